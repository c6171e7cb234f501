"""`detour show memory`: what a model takes on a device, how much fits beside it, and how fast a
step could be at best. From the configuration alone, and the device need not be here."""

from rich.console import Console
from rich.table import Table

from detour.cli.target import Target
from detour.worker.outline import PARTS
from detour.worker.roofline import decode_bound


def show(target: Target) -> None:
    console = Console()
    console.print(weights_table(target))
    console.print(room_table(target))
    if target.chip is not None:
        console.print(bounds_table(target))


def titled(target: Target, what: str, *columns: str) -> Table:
    """A table whose columns but the first are numbers."""
    model = target.model
    ranks = f", rank 0 of {model.ranks}" if model.ranks > 1 else ""
    title = f"{what}: {model.config['model_type']} on {model.device.name}{ranks}"
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def weights_table(target: Target) -> Table:
    table = titled(target, "Weights", "part", "numbers", "as", "GiB")
    weights = target.model.weights
    for part in (name for _, name in PARTS):
        own = [weight for weight in weights if weight.part == part]
        if own:
            forms = " ".join(dict.fromkeys(weight.form for weight in own))
            numbers = sum(weight.parameter.numel for weight in own)
            table.add_row(part, count(numbers), forms, gib(sum(weight.nbytes for weight in own)))
    numbers = sum(weight.parameter.numel for weight in weights)
    table.add_section()
    table.add_row("all", count(numbers), "", gib(target.model.weight_bytes))
    return table


def room_table(target: Target) -> Table:
    model, fits = target.model, target.fits
    table = titled(target, "Memory", "what", "how much")
    token = model.kv_bytes_per_token
    share = f" ({fits.share:.0%} may be taken)" if model.device.is_cuda else ""
    rows = [
        (f"memory{share}", f"{gib(fits.memory)} GiB"),
        ("weights", f"{gib(model.weight_bytes)} GiB"),
        ("index scores of a step", f"{gib(fits.scores)} GiB"),
        (
            f"activations of {target.settings.max_step_tokens:,} tokens, about",
            f"{gib(fits.activations)} GiB",
        ),
        ("left for KV", f"{gib(fits.kv)} GiB"),
        ("KV of a token", f"{token:,} bytes ({token / 1024:.1f} KiB)"),
        (
            f"KV taken ({target.settings.kv_dtype})",
            f"{gib(fits.pages * token * _page(target))} GiB",
        ),
        ("pages", f"{fits.pages:,} of {_page(target)} tokens"),
        ("tokens that fit", f"{fits.tokens:,}"),
        ("sequences at once, at most", f"{fits.sequences:,}"),
        (f"  that fit, of {fits.context:,} tokens each", f"{fits.fit(fits.context):,}"),
        (f"  that fit, of {target.mean_context:,}", f"{fits.fit(target.mean_context):,}"),
    ]
    for what, amount in rows:
        table.add_row(what, amount)
    return table


def bounds_table(target: Target) -> Table:
    """The least a decode step can take, whatever the kernels."""
    assert target.chip is not None
    columns = ("wanted", "running", "step ms", "all-reduce ms", "tok/s", "longest parts")
    table = titled(target, "Bound of a decode step", *columns)
    table.columns[-1].justify = table.caption_justify = "left"
    table.caption = "As many run as --max-running-requests and the cache allow."
    for wanted in target.concurrencies:
        fits = target.fits
        held = min(wanted, fits.sequences, fits.fit(target.mean_context)) or wanted
        bound = decode_bound(target.model, target.chip, held, target.mean_context)
        longest = ", ".join(
            f"{part} {1e3 * seconds:.2f}" for part, seconds in list(bound.by_part.items())[:3]
        )
        table.add_row(
            f"{wanted:,}",
            f"{held:,}",
            f"{1e3 * bound.seconds:.2f}",
            f"{1e3 * bound.exchanging:.2f}",
            f"{bound.tokens_per_second(held):,.0f}",
            longest,
        )
    return table


def _page(target: Target) -> int:
    return target.settings.page_size


def gib(number: float) -> str:
    return f"{number / 2**30:,.2f}"


def count(numbers: float) -> str:
    return f"{numbers / 1e9:,.2f} B" if numbers >= 1e9 else f"{numbers / 1e6:,.1f} M"
