"""The HTTP application: routes, middleware, errors. Knows the parts of api/ and how they fit."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from detour import __version__
from detour.api.admin import admin_router, health_router, models_router
from detour.api.chat import chat_router
from detour.api.completions import completions_router
from detour.api.failures import add_handlers
from detour.api.front import Front
from detour.api.generate import generate_router
from detour.api.guard import Guard
from detour.api.settings import ApiSettings
from detour.api.tokens import tokens_router
from detour.engine.client import EngineHandle
from detour.text.chat_template import ChatTemplate
from detour.text.tokenizer import Tokenizer

_ROUTERS = (
    chat_router,
    completions_router,
    generate_router,
    models_router,
    health_router,
    admin_router,
    tokens_router,
)


def build_app(
    engine: EngineHandle, tokenizer: Tokenizer, chat_template: ChatTemplate, settings: ApiSettings
) -> FastAPI:
    """An ASGI app over a running (or starting) engine. It owns tokenizer threads, no process."""
    front = Front(engine, tokenizer, chat_template, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        front.prompts.close()

    app = FastAPI(
        title="Detour",
        version=__version__,
        description="An LLM inference server: OpenAI's routes and SGLang's native ones.",
        lifespan=lifespan,
    )
    add_handlers(app)
    for router in _ROUTERS:
        app.include_router(router(front))
    app.add_middleware(
        Guard,
        metrics=front.metrics,
        api_key=settings.api_key,
        admin_api_key=settings.admin_api_key,
        max_body_bytes=settings.max_body_bytes,
    )
    if settings.cors_origins:  # the outermost: an error's answer needs the headers too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app
