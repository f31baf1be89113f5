"""Writes what Jinja2, set up as Hugging Face sets it up, makes of chat templates.

Usage: make_chat_cases.py OUT_JSON

The output is a list of {"template", "messages", "add_generation_prompt", "text", "error"}; one of the
last two is null. The templates use what those of well-known models use. Lengths of texts beyond ASCII
are left out: the C++ engine counts bytes, Jinja2 characters.
"""

import datetime
import json
import sys

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

HEADERS = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|/head|>\\n\\nToday: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {%- set content = '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
"""

THINKING = """{%- if tools %}
    {{- 'tools!' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index or loop.last %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n\\n</think>\\n\\n' + content.strip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

ALTERNATING = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported, not ' + message['role'] + '!') }}{% endif %}{% endfor %}"""

BLOCKS = """{# a comment #}
{% macro turn(role, text='nothing') %}
[{{ role | upper }}] {{ text | replace('a', 'A') }}
{% endmacro %}
{% for m in messages if m.role != 'tool' %}
  {% set long = (m.content | length) > 20 %}
{{ turn(m.role, m.content) }}{{ 'long' if long else 'short' }} {{ loop.index }}/{{ loop.length }}
{% else %}
none
{% endfor %}
{% for i in range(3) %}{{ i }}{% if not loop.last %}, {% endif %}{% endfor %}
{{ messages | map(attribute='role') | join(' ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
"""

TEMPLATES = [HEADERS, THINKING, ALTERNATING, BLOCKS]


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


CHATS = [
    chat(("user", "Hello!")),
    chat(("system", "  Be brief.\n"), ("user", " What is 1+1?  ")),
    chat(("user", "a"), ("assistant", "b"), ("user", "c")),
    chat(("system", "s"), ("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb\n"), ("user", "ä 漢 🙂")),
    chat(("user", "a"), ("assistant", "unfinished")),
    chat(("user", "a"), ("user", "b")),
    chat(("tool", "x"), ("user", "{{ 7 * 7 }} {% raw %} <|im_end|>")),
    chat(("user", ""), ("assistant", "")),
]


class Refusal(Exception):
    pass


def raise_exception(message):
    raise Refusal(message)


def strftime_now(form):
    return datetime.datetime(2026, 3, 9, 12, 0, 0).strftime(form)


def main():
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    cases = []
    for template in TEMPLATES:
        compiled = environment.from_string(template)
        for messages in CHATS:
            for add_generation_prompt in (True, False):
                case = {"template": template, "messages": messages, "text": None, "error": None,
                        "add_generation_prompt": add_generation_prompt}
                try:
                    case["text"] = compiled.render(
                        messages=messages, tools=None, documents=None,
                        add_generation_prompt=add_generation_prompt, **TOKENS)
                except (Refusal, TemplateError) as error:
                    case["error"] = str(error)
                cases.append(case)
    with open(sys.argv[1], "w", encoding="ascii") as out:
        json.dump({"tokens": TOKENS, "cases": cases}, out)


if __name__ == "__main__":
    main()
