"""Health, models, what the server is and holds, and the control routes.

Generates nothing, except for /health_generate, whose point that is.
"""

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from detour import __version__
from detour.api.front import Envelope, Front, Want
from detour.api.guard import REQUEST_ID
from detour.api.prompts import Prompt
from detour.api.replies import json_reply
from detour.api.schema import AbortRequest
from detour.engine.channel import Stats
from detour.errors import BadRequest, NotFound, Unavailable
from detour.sampling_params import SamplingParams

HEALTH_GENERATE_SECONDS = 20.0
METRICS_SECONDS = 1.0  # a scrape does not wait longer for a busy engine; it shows the last snapshot


def health_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["Health"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", summary="Does the server take requests?")
    @router.get("/ready", summary="As /health")
    @router.get("/ping", summary="As /health (SageMaker's name)")
    async def health() -> Response:
        """200 when it does, else 503 with state and reason: starting, recovering, draining, failed."""
        state = front.engine.state
        reply = json_reply({"status": state, "message": front.engine.failure})
        reply.status_code = 200 if state == "ready" else 503
        return reply

    @router.get("/health_generate", summary="Does the engine generate a token?")
    async def health_generate(http: Request) -> Response:
        """Generates one token; 503 if that fails or takes more than 20 s."""
        prompt = Prompt([front.tokenizer.encode("a", False)[0]])
        want = Want(prompt, SamplingParams(temperature=0.0), 1, 1, 1)
        envelope = Envelope(http.scope[REQUEST_ID], time.perf_counter())
        generation = front.generate([want], envelope)
        try:
            await asyncio.wait_for(generation.wait(http.receive), HEALTH_GENERATE_SECONDS)
        except TimeoutError:
            raise Unavailable(
                f"The engine gave no token within {HEALTH_GENERATE_SECONDS:.0f} s."
            ) from None
        return json_reply({"status": "ready"})

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        """Own names begin with detour_; vLLM's and SGLang's names are there beside them."""
        try:
            stats = await asyncio.wait_for(front.engine.stats(), METRICS_SECONDS)
            front.metrics.set_engine(_gauges(stats, front.engine.ready.page_size))
        except (TimeoutError, Unavailable):
            pass
        return Response(front.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return router


def models_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["Models"])

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": front.started_at,
            "owned_by": "detour",
            "root": front.settings.model_path,
            "parent": None,
            "max_model_len": front.engine.ready.context_length,
        }

    @router.get("/v1/models", summary="What is served")
    async def models() -> Response:
        cards = [card(name) for name in front.settings.names]
        return json_reply({"object": "list", "data": cards})

    @router.get("/v1/models/{name:path}", summary="One served model")
    async def model(name: str) -> Response:
        if name not in front.settings.names:
            front.check_model(name)  # raises unless it is an accepted spelling
        return json_reply(card(name))

    @router.get("/model_info", summary="The model's path and shape")
    @router.get("/get_model_info", summary="As /model_info")
    async def model_info() -> Response:
        ready, settings = front.engine.ready, front.settings
        return json_reply(
            {
                "model_path": settings.model_path,
                "tokenizer_path": settings.tokenizer_path or settings.model_path,
                "served_model_names": list(settings.names),
                "is_generation": True,
                "preferred_sampling_params": dict(settings.generation_defaults) or None,
                "weight_version": "default",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": settings.model_config.get("model_type"),
                "architectures": settings.model_config.get("architectures"),
                "context_length": ready.context_length,
                "vocab_size": ready.vocab_size,
                "dtype": ready.dtype,
            }
        )

    return router


def admin_router(front: Front) -> APIRouter:
    router = APIRouter(tags=["Server"])

    @router.get("/server_info", summary="Every option, the engine's shape and its state now")
    @router.get("/get_server_info", summary="As /server_info")
    async def server_info() -> Response:
        """`internal_states` holds one entry for each engine, as SGLang's clients expect."""
        ready = front.engine.ready
        stats = await front.engine.stats()
        shape = {name: getattr(ready, name) for name in ready.__struct_fields__}
        capacity = (ready.num_pages - 1) * ready.page_size
        return json_reply(
            dict(front.settings.server_config)
            | {
                "version": __version__,
                "status": front.engine.state,
                "model_path": front.settings.model_path,
                "served_model_name": front.settings.names[0],
                "max_total_num_tokens": capacity,
                "engine": shape,
                "internal_states": [_state(stats)],
            }
        )

    @router.get("/v1/loads", summary="How much each engine has to do")
    async def loads() -> Response:
        load = _load(await front.engine.stats(), front.engine.ready.page_size)
        return json_reply(
            {
                "timestamp": time.time(),
                "version": __version__,
                "dp_rank_count": 1,
                "loads": [load],
                "aggregate": {
                    "total_running_reqs": load["num_running_reqs"],
                    "total_waiting_reqs": load["num_waiting_reqs"],
                    "total_reqs": load["num_reqs"],
                    "avg_token_usage": load["token_usage"],
                    "avg_throughput": load["gen_throughput"],
                },
            }
        )

    @router.get("/get_load", summary="The older form of /v1/loads")
    async def get_load() -> Response:
        return json_reply([_load(await front.engine.stats(), front.engine.ready.page_size)])

    @router.get("/flush_cache", summary="Forget cached prefixes")
    @router.post("/flush_cache", summary="Forget cached prefixes")
    @router.post("/reset_prefix_cache", summary="As /flush_cache (vLLM's name)")
    async def flush_cache() -> Response:
        """Prefixes that running requests use stay; the reply says so."""
        left = await front.engine.flush_cache()
        return PlainTextResponse(f"{left or 'Cache flushed.'}\n")

    @router.post("/abort_request", summary="End a request by its id")
    async def abort_request(body: AbortRequest) -> Response:
        """Its client gets what there is, with finish reason `abort`."""
        if not (body.rid or body.abort_all):
            raise BadRequest("Give the request's id as rid, or abort_all.", param="rid")
        if body.abort_all:
            found = [one for group in front.open.values() for one in group]
        else:
            found = list(front.open.get(body.rid, ()))
            if not found:
                raise NotFound(f"No open request has the id {body.rid!r}.", param="rid")
        for generation in found:
            generation.cancel()
        return json_reply({"aborted": len(found)})

    return router


def _state(stats: Stats) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(stats, name) for name in stats.__struct_fields__}
    return fields | {
        "last_gen_throughput": stats.tokens_per_second,
        "avg_spec_accept_length": None,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
    }


def _load(stats: Stats, page_size: int) -> dict[str, Any]:
    return {
        "dp_rank": 0,
        "num_reqs": stats.running + stats.waiting,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_tokens": stats.pages_held * page_size,
        "num_used_tokens": stats.pages_held * page_size,
        "max_total_num_tokens": stats.pages_total * page_size,
        "token_usage": stats.pages_held / max(1, stats.pages_total),
        "gen_throughput": stats.tokens_per_second,
        "cache_hit_rate": _hit_rate(stats),
    }


def _hit_rate(stats: Stats) -> float:
    return stats.cached_tokens / max(1, stats.cached_tokens + stats.prompt_tokens)


def _gauges(stats: Stats, page_size: int) -> dict[str, float]:
    """By the names that metrics.py declares."""
    return {
        "requests_running": stats.running,
        "requests_waiting": stats.waiting,
        "token_usage": stats.pages_held / max(1, stats.pages_total),
        "used_tokens": stats.pages_held * page_size,
        "capacity_tokens": stats.pages_total * page_size,
        "cached_prefix_tokens": stats.pages_cached * page_size,
        "cache_hit_rate": _hit_rate(stats),
        "generation_throughput": stats.tokens_per_second,
        "step_seconds": stats.last_step_seconds,
        "steps": stats.steps,
        "preemptions": stats.preemptions,
        "evicted_pages": stats.evicted_pages,
        "healed": stats.healed,
    }
