from __future__ import annotations

from dialoop.chat import History, Message
from dialoop.sequences import PolicyVersion
from dialoop_services.inference.rendering import GenerationRequest, Renderer
from dialoop_services.runtime.metrics import LabelledCounts, Metrics

from tests.support.samples.chat_families import CHATML, THINKING, builder

V1 = PolicyVersion(lineage="main", number=1)


def fork(template: str, *, changed: bool = False) -> Renderer:
    tokens = builder(template)
    renderer = Renderer(tokens.tokenizer, tokens.template)
    history = History((Message(role="user", content="q"),))
    ids = tokens.tokenizer.encode("<think>\nhm\n</think>\n\nx").ids
    answer = tokens.answer(tokens.prompt(history), ids, versions=[(len(ids), V1)])
    message = Message(role="assistant", content="edited") if changed else answer.message
    longer = history.append(message).append(Message(role="user", content="r"))
    renderer.prompt(
        GenerationRequest(history=longer, context=answer.appended, num_context_messages=2)
    )
    return renderer


def test_forks_are_counted_by_cause():
    assert fork(THINKING).num_forks == {"template_rewrites_past": 1}
    assert fork(CHATML, changed=True).num_forks == {"history_rewritten": 1}
    assert not fork(CHATML).num_forks


def test_counts_that_a_service_keeps_are_among_its_metrics():
    metrics, kept = Metrics(), {"history_rewritten": 2}
    counts = LabelledCounts(name="dialoop_forks", text="Forks.", label="cause", read=lambda: kept)
    metrics.show(counts)
    kept["history_rewritten"] += 1
    assert b'dialoop_forks_total{cause="history_rewritten"} 3.0' in metrics.exposition()
