"""What would go wrong, or go otherwise than asked, with a model on a device: sentences.

Each says what to change. Knows the outline and the forecast; nothing of how they are shown.
"""

from collections.abc import Iterator

from detour.worker.forecast import Forecast
from detour.worker.outline import Outline
from detour.worker.settings import WorkerSettings


def problems(settings: WorkerSettings, model: Outline, fits: Forecast) -> list[str]:
    """What would end the start."""
    return [*_context(settings, model), *_memory(model, fits)]


def surprises(settings: WorkerSettings, model: Outline, fits: Forecast) -> list[str]:
    """What would be served otherwise than asked."""
    found = [*_unmet_wishes(settings, model)]
    if 0 < fits.tokens < fits.context:
        found.append(
            f"The KV cache holds {fits.tokens:,} tokens, so no sequence gets more, though the "
            f"context is {fits.context:,}: that would take "
            f"{_gib(model.kv_bytes_per_token * fits.context)}."
        )
    return found


def _unmet_wishes(settings: WorkerSettings, model: Outline) -> Iterator[str]:
    """Backends that were asked for and are not what computes."""
    used = {op for op, _ in model.routes.chosen}
    for op, wish in settings.backends.items():
        if op not in used:
            yield (
                f"{wish} was asked for as backend of {op}, an op that {model.config['model_type']} "
                f"does not use (it uses {', '.join(sorted(used))})."
            )
    for (op, _), route in model.routes.chosen.items():
        wish = settings.backends.get(op, "")
        if wish and route.current.name != wish:
            why = "; ".join(route.lost.get(wish, ["there is no backend of that name"]))
            yield f"{op} uses {route.current.name} instead of {wish}: {why}."


def _context(settings: WorkerSettings, model: Outline) -> Iterator[str]:
    longest = model.model.longest_context
    if settings.context_length > longest:
        yield (
            f"--context-length is {settings.context_length}, but the model is made for {longest} "
            "tokens: lower it, or override max_position_embeddings."
        )


def _memory(model: Outline, fits: Forecast) -> Iterator[str]:
    """Not even a page fits beside page 0."""
    if fits.pages >= 2:
        return
    step = fits.activations + fits.scores
    allowed = fits.memory * fits.share if model.device.is_cuda else fits.memory
    roomy = fits.memory - model.weight_bytes > step + model.kv_bytes_per_token * 1024
    change = "raise --mem-fraction-static" if roomy else "take a smaller packing or a larger device"
    yield (
        f"The weights take {_gib(model.weight_bytes)} of a rank and a step {_gib(step)}, but "
        f"{_gib(allowed)} may be taken: use more ranks, or {change}."
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
