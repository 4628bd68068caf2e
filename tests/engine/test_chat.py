"""Chat templates: rendered as Transformers does, continued token for token, harmless when hostile."""

from __future__ import annotations

import resource
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from power_lab.engine import chat_budget
from power_lab.engine.chat import ChatTemplate
from power_lab.engine.tokenizer import CONTROL, NORMAL, Tokenizer
from power_lab.engine.weights.gguf import GgufFile
from power_lab.errors import ConfigError, TokenizerError
from tests.engine.tokenizer.toys import CODE, byte_level

NAMES = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system, rest = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system, rest = '', messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user, assistant, user, ...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (system ~ '\n\n' if loop.first and system) ~ message.content.strip() ~ ' [/INST]' }}
    {%- else %}
        {{- ' ' ~ message.content | trim ~ ' ' ~ eos_token }}
    {%- endif %}
{%- endfor %}"""
THINKING = """
{%- macro block(role, text) -%}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{%- set ns = namespace(last=-1, tools=[]) -%}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' and message.tool_calls is defined -%}
    {%- for call in message.tool_calls -%}
      {%- set ns.tools = ns.tools + [call.function.name | upper] -%}
      {{- block('assistant', '<call>' ~ (call.function.arguments | tojson) ~ '</call>') -}}
    {%- endfor -%}
  {%- elif message.role == 'assistant' -%}
    {%- set text = message.content.split('</think>')[-1].lstrip('\n') if '</think>' in message.content else message.content -%}
    {{- block('assistant', text) -}}
  {%- elif message.content is string -%}
    {{- block(message.role, message.content) -}}
  {%- else -%}
    {{- block(message.role, message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join('\n')) -}}
  {%- endif -%}
{%- endfor -%}
{%- generation -%}{%- if ns.tools %}{{ ns.tools | unique | sort | join(', ') }}{% endif -%}{%- endgeneration -%}
{%- for n in range(3) if n != 1 %}{% if loop.last %}{% break %}{% endif %}{{ n }}{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
{{- messages | length }} {{ ns.last }} {{ {'a': [1, none, true]} | tojson(indent=2) }} {{ '%s-%d' % ('x', 3) }}
{%- for key, value in {'b': 1, 'a': 2} | dictsort %} {{ key }}={{ value }}{% endfor %}{{ undefined_thing | default('!') }}"""


def tokenizer(template: str, **options: Any) -> Tokenizer:
    """Ids 0..255 are bytes, then NAMES as control tokens."""
    types = np.array([NORMAL] * 256 + [CONTROL] * len(NAMES), np.int32)
    options = {"bos_id": 256, "add_bos": True, "end_ids": [257]} | options
    return byte_level([*CODE.values(), *NAMES], types, chat_template=template, **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CHATS: list[list[dict[str, Any]]] = [
    [user("Hi")],
    [{"role": "system", "content": " Be brief. "}, user("Hi"), answer(" Hello! "), user("  Bye\n")],
    [user("2+2?"), answer("<think>\nhm\n</think>\n\n4"), user("<b>&'\"日本 \\")],
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5], "y": "é<"}}}],
    },
    {"role": "tool", "content": "3", "name": "f"},
]


@pytest.mark.parametrize("template", [CHATML, BRACKETS, THINKING], ids=["chatml", "brackets", "thinking"])
def test_renders_as_transformers_does(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for chat in [*CHATS, *([PARTS] if template is THINKING else [])]:
        for prompt in (True, False):
            theirs, _ = render_jinja_template(
                [chat], chat_template=template, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
            )
            assert ChatTemplate(template, bos="<s>", eos="</s>").render(chat, prompt) == theirs[0]


def test_the_default_models_template(smollm2_path: Path) -> None:
    with GgufFile.open(smollm2_path) as file:
        smol = Tokenizer.from_gguf(file.metadata)
    chat = [user("What is 2+2?")]
    assert smol.chat_template is not None
    text = smol.chat_template.render(chat)
    assert text.endswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")
    prompt = smol.encode_chat(chat)
    assert prompt == smol.encode(text, special=True, bos=True)
    out = [*smol.encode("It is 4.", special=False, bos=False), 2]
    whole = smol.encode_chat([*chat, answer("It is 4."), user("And 3+3?")])
    assert [*prompt, *out, *smol.continuation(out, "And 3+3?", chat)] == whole
    assert smol.continuation(out, "And 3+3?") == smol.continuation(out, "And 3+3?", chat)


CONTENT = st.one_of(st.text(max_size=20), st.lists(st.sampled_from([*NAMES, "<|im_", "a", "\ufdd0"])).map("".join))


@given(CONTENT, CONTENT, CONTENT)
@settings(max_examples=80, deadline=None)
def test_messages_cannot_write_special_tokens(system: str, first: str, second: str) -> None:
    chatml = tokenizer(CHATML, end_ids=[259])
    ids = chatml.encode_chat([{"role": "system", "content": system}, user(first), answer(second), user(first)])
    assert [token for token in ids if token >= 256] == [256, *[258, 259] * 4, 258]
    assert chatml.decode(ids) == "".join(
        f"{role}\n{text}\n" for role, text in [("system", system), ("user", first), ("assistant", second), ("user", first)]
    ) + "assistant\n"  # fmt: skip


def test_the_templates_own_beginning_of_text_is_not_doubled() -> None:
    assert tokenizer(BRACKETS).encode_chat([user("x")])[:2] == [256, 260]
    assert tokenizer(CHATML).encode_chat([user("x")])[:2] == [256, 258]
    assert tokenizer(CHATML, add_bos=False).encode_chat([user("x")])[0] == 258


@pytest.mark.parametrize("text", ["fine", " spaced ", "", "two\nlines", "<|im_end|>"])
@pytest.mark.parametrize(("template", "end"), [(CHATML, 259), (BRACKETS, 257)], ids=["chatml", "brackets"])
def test_a_continuation_leaves_the_tokens_before_it_alone(template: str, end: int, text: str) -> None:
    model = tokenizer(template, end_ids=[end])
    chat = [user("question")]
    said = model.encode(text, special=False, bos=False)
    open_, closed = (model.continuation(out, "next", chat) for out in (said, [*said, end]))
    lead = [] if template is CHATML else [ord(" ")]
    assert open_ == [*lead, end, *closed], "the end token comes once, whoever wrote it"
    whole = model.encode_chat([*chat, answer("x"), user("next")])
    assert whole[-len(closed) :] == closed
    assert model.continuation([*said, end], "next <|im_end|>", chat).count(259) == closed.count(259)


def test_a_continuation_keeps_what_the_template_puts_before_the_end_token() -> None:
    signed = tokenizer("{% for m in messages %}{{ m.content }} END{{ eos_token }}{% endfor %}")
    tail = [*b" END", 257, *b"next END", 257]
    assert signed.continuation([1, 257], "next") == signed.continuation([1], "next") == tail


def test_a_continuation_refuses_templates_that_change_answers() -> None:
    for template in [
        "{% for m in messages %}{{ m.content | upper if m.role == 'assistant' else m.content }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ]:
        with pytest.raises(TokenizerError, match="does not keep the assistant's answer"):
            tokenizer(template).continuation([1, 2], "next")


def test_models_without_a_template_say_so() -> None:
    bare = byte_level([*CODE.values()], np.ones(256, np.int32))
    for ask in (lambda: bare.encode_chat([user("x")]), lambda: bare.continuation([1], "x")):
        with pytest.raises(TokenizerError, match="no chat template"):
            ask()


@pytest.mark.parametrize(
    ("messages", "key"),
    [
        ([], "messages"),
        ("text", "messages"),
        ([user("x")] * 4097, "messages"),
        (["text"], "messages[0]"),
        ([user("x"), {"content": "x"}], "messages[1].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        ([{"role": "user", "content": "x", "name": object()}], "messages[0].name"),
        ([user("x" * (1 << 22))], "messages"),
    ],
)
def test_wrong_messages_are_refused_by_key(messages: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.key == key


def test_cyclic_messages_are_refused() -> None:
    call: list[Any] = []
    call.append(call)
    with pytest.raises(ConfigError, match="nested more than 32 deep"):
        ChatTemplate(CHATML).render([{"role": "user", "content": "x", "tool_calls": [{"x": call}]}])


def test_template_errors_and_refusals_are_typed() -> None:
    with pytest.raises(TokenizerError, match="refuses these messages: Roles must alternate"):
        ChatTemplate(BRACKETS).render([user("a"), user("b")])
    with pytest.raises(TokenizerError, match="cannot be compiled: TemplateSyntaxError"):
        ChatTemplate("{% for %}").render([user("a")])
    with pytest.raises(TokenizerError, match="has 70000 characters"):
        ChatTemplate("x" * 70000).render([user("a")])


def test_the_date_comes_from_the_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 2, 3))
    assert template.render([user("x")]) == "03 Feb 2026"


LISTS = "{% set l = [1] %}" + "{% set l = [l, l] %}" * 50
HOSTILE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro chain": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1] recursive %}{{ loop([i, i]) }}{% endfor %}",
    "repeat": "{{ 'x' * 10**10 }}",
    "repeat twice": "{% set x = 'x' * 10**6 %}{{ x * 10**6 }}",
    "repeat a list": "{{ [1] * 10**9 }}",
    "power": "{{ 10**10**10 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling blocks": "{% set s = 'a' * 999 %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 50,
    "doubling lists": LISTS + "{{ l }}",
    "doubling lists as JSON": LISTS + "{{ l | tojson }}",
    "doubling dicts": "{% set d = {} %}" + "{% set d = {1: d, 2: d} %}" * 50,
    "doubling namespaces": "{% set n = namespace() %}" + "{% set n = namespace(a=n, b=n) %}" * 50 + "{{ n }}",
    "hidden namespaces": "{% set n = namespace() %}" + "{% set n = namespace(a=[n, n]) %}" * 50 + "{{ n }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "replace by method": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "replace in map": "{{ ['a' * 999] * 999 | map('replace', 'a', 'b' * 99999) | list }}",
    "join": "{{ ([1] * 99999) | join('a' * 10**6) }}",
    "join by method": "{{ ('a' * 10**6).join(['a'] * 9999) }}",
    "pad": "{{ 'x'.ljust(10**9) }}",
    "centre": "{{ 'x' | center(10**9) }}",
    "format width": "{{ '%1000000000d' % 1 }}",
    "format star": "{{ '%*d' % (10**9, 1) }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "format many": "{{ '%(a)s' * 99999 % {'a': 'x' * 99999} }}",
    "indent": "{{ ('\\n' * 10**6) | indent(10**6) }}",
    "indent JSON": "{{ [[1]] | tojson(indent=10**9) }}",
    "round": "{{ 1 | round(10**7, 'ceil') }}",
    "round in map": "{{ [1] | map('round', precision=10**7, method='floor') | list }}",
    "lipsum": "{{ lipsum(10**6) }}",
    "strftime": "{{ strftime_now('%0999999999d') }}",
    "strip": "{{ ('ab' * 10**6).strip('c' * 10**6 ~ 'ab') }}",
    "rfind": "{{ ('a' * 10**6).rfind('b' ~ 'a' * 10**5) }}",
    "compare": "{% set l = [1] * 99999 %}{% for i in range(99999) %}{% if l == [1] * 99999 %}{% endif %}{% endfor %}",
    "search": "{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
    "slices": "{% set s = [1] * 99999 %}{% for i in range(99999) %}{% set t = s[:] %}{% endfor %}",
    "unrolled": "{% set s = 'a' * 4000000 %}" + "{% set t = s ~ 'b' %}" * 999,
    "captured": "{% set s = 'a' * 4000000 %}{% set x %}" + "{{ s }}" * 5000 + "{% endset %}",
    "captured text": "{% set x %}{% for i in range(99999) %}" + "z" * 50000 + "{% endfor %}{% endset %}",
    "deep source": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long source": "{{ " + " + ".join(["1"] * 15000) + " }}",
    "nested source": "".join(f"{{% for a{i} in [1] %}}" for i in range(50)) + "{% endfor %}" * 50,
    "class": "{{ ''.__class__.__mro__ }}",
    "class by item": "{{ ''['__class__'] }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "class by map": "{{ messages | map(attribute='__class__') | list }}",
    "class of a namespace": "{{ namespace().__class__ }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__globals__ }}{{ f._func }}",
    "globals of a caller": "{% macro f() %}{{ caller._func }}{% endmacro %}{% call f() %}{% endcall %}",
    "self of a method": "{{ ''.join.__self__ }}",
    "insides of a loop": "{% for i in [1] %}{{ loop._iterator }}{% endfor %}",
    "insides of self": "{{ self.__init__ }}{{ self._TemplateReference__context }}",
    "change a message": "{{ messages.append(1) }}",
    "clear a message": "{{ messages[0].clear() }}",
    "import": "{% import 'x' as y %}",
    "include": "{% include 'x' %}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_end_soon_in_a_typed_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_budget, "MAX_SECONDS", 0.1)  # to be quick; the real bound is tested below
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    messages = [user("x")]
    with pytest.raises(TokenizerError):
        ChatTemplate(HOSTILE[case]).render(messages)
    assert messages == [user("x")]
    assert time.thread_time() - start < 3, "processor seconds of this thread, with room for slow machines"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10


def test_the_bound_is_processor_time_of_about_a_second() -> None:
    start = time.thread_time()
    with pytest.raises(TokenizerError, match=r"runs longer than 1\.0 s"):
        ChatTemplate(HOSTILE["nested loops"]).render([user("x")])
    assert 1 <= time.thread_time() - start < 3


EXPRESSIONS = st.recursive(
    st.sampled_from(["1", "3", "'ab'", "[]", "x", "messages", "none", "1.5", "{}", "nope"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "*", "**", "~", "%", "//", "in", "=="]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        ),
        st.tuples(
            inner, st.sampled_from(["upper", "list", "tojson", "join('--')", "replace('a', 'bb')", "length"])
        ).map(lambda parts: f"({parts[0]} | {parts[1]})"),
        st.tuples(inner, inner).map(lambda parts: f"[{parts[0]}, {parts[1]}]"),
    ),
    max_leaves=12,
)


@given(st.lists(EXPRESSIONS, min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_program_gives_text_or_a_typed_error(expressions: list[str]) -> None:
    body = "".join(f"{{% set ns.x = {expression} %}}{{% set x = ns.x %}}" for expression in expressions)
    source = f"{{% set ns = namespace(x='a') %}}{{% for i in range(40) %}}{body}{{% endfor %}}{{{{ ns.x }}}}"
    start = time.thread_time()
    with suppress(TokenizerError):
        assert isinstance(ChatTemplate(source).render([user("x")]), str)
    assert time.thread_time() - start < 4
