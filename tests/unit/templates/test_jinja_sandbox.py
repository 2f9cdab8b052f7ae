from __future__ import annotations

import pytest
from dialoop.templates.chat_template import TemplateSandbox
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

SNIPPETS = [
    "{{ m.role }}",
    "{{ m.missing is defined }}{{ m.missing }}",
    "{{ m.missing.deeper }}",
    "{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}",
    "{{ m['items'] }}{{ m.get('role') }}",
    "{{ m.__class__ }}",
    "{{ m.update({'a': 1}) }}",
    "{{ m.values.__globals__ }}",
    "{% for x in [1, 2] %}{{ loop.index }}{{ loop.last }}{{ loop.none }}{% endfor %}",
    "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
    "{% set ns = namespace(a=1) %}{% set ns.b = 2 %}{{ ns.a }}{{ ns.b }}{{ ns.c }}",
    "{% set ns = namespace(a=1) %}{{ ns.__init__ }}",
    "{{ m.role.split('s')[0] }}{{ '{0.__class__}'.format(m) }}",
    "{{ l.append(1) }}",
]


def render(kind, source: str) -> str:
    message = {"role": "user", "items": "shadowed"}
    try:
        return kind().from_string(source).render(m=message, l=[1])
    except SecurityError:
        return "refused"
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("source", SNIPPETS)
def test_the_sandbox_shows_and_refuses_what_jinjas_own_does(source):
    assert render(TemplateSandbox, source) == render(ImmutableSandboxedEnvironment, source)


def test_the_snippets_do_meet_the_sandbox():
    assert "refused" in {render(TemplateSandbox, source) for source in SNIPPETS}
