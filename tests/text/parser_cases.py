"""The parsers behind the interface of the project's shared cases (run_cases.py --adapter).

PYTHONPATH=src:tests/text python ../shared/cases/run_cases.py --adapter parser_cases:Adapter --perf
"""

from detour.api.answer import Answer
from detour.text.reply_parser import reply_syntax


def answer(tools, prompt_opens_think, tool_parser):
    syntax = reply_syntax("glm45", tool_parser, "").less(thinking=False, calls=not tools)
    parser = syntax.parser("<think>" if prompt_opens_think else "", tools or ())
    assert parser is not None
    return Answer(parser)


class Stream:
    def __init__(self, parted: Answer) -> None:
        self.feed = parted.push
        self.finish = parted.finish


class Adapter:
    def new_stream(self, *, tools, thinking, prompt_opens_think, tool_parser="glm47"):
        return Stream(answer(tools, prompt_opens_think, tool_parser))

    def parse_full(
        self, text, *, tools, thinking, prompt_opens_think, finish_reason, tool_parser="glm47"
    ):
        message = answer(tools, prompt_opens_think, tool_parser).message(text, finish_reason)
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return {**message, "tool_calls": calls}
