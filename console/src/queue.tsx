// The groups that the queue gave up, with their reasons, and a way to put them back.

import { useState } from "preact/hooks";
import type { DeadLetter, Run } from "./answers";
import { post } from "./api";
import { useAnswer, useKeys, useTicks } from "./hooks";
import { number, plain, Problem } from "./texts";

export function QueuePage({ run }: { run: Run }) {
  const path = `runs/${encodeURIComponent(run.name)}`;
  const [done, setDone] = useState(0);
  const ticks = useTicks(5);
  const { value, error } = useAnswer<{ dead_letters: DeadLetter[] }>(
    `${path}/queue`,
    `${ticks}/${done}`,
  );
  const [chosen, setChosen] = useState<Set<string>>(new Set());
  const [text, setText] = useState("");
  const letters = value?.dead_letters ?? [];
  const ids = letters.map((letter) => letter.group_id).filter((id) => chosen.has(id));
  const toggle = (id: string) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    setChosen(next);
  };
  const all = () =>
    setChosen(new Set(ids.length < letters.length ? letters.map((each) => each.group_id) : []));
  const requeue = () => {
    if (ids.length === 0) return;
    post<{ num_requeued: number }>(`${path}/requeue`, { group_ids: ids })
      .then((answer) => setText(`${number(answer.num_requeued)} groups are in the queue again.`))
      .catch((failure) => setText(failure.message))
      .then(() => {
        setChosen(new Set());
        setDone(done + 1);
      });
  };
  useKeys({ a: all, e: requeue });
  return (
    <main>
      {error && <Problem text={error.message} />}
      <p class="count" aria-live="polite">
        <span id="total">{number(letters.length)}</span> dead letters
        {text && `. ${text}`}
        <button type="button" onClick={all} disabled={letters.length === 0}>
          Choose all <kbd>a</kbd>
        </button>
        <button type="button" onClick={requeue} disabled={ids.length === 0}>
          Put {number(ids.length)} back <kbd>e</kbd>
        </button>
      </p>
      <div class="scroll" tabIndex={0} role="group" aria-label="Dead letters">
        <table class="weights" id="letters">
          <thead>
            <tr>
              {["choose", "group", "reason", "stage", "deliveries", "environment", "task", "rewards", "tokens"].map(
                (title) => (
                  <th>{title}</th>
                ),
              )}
            </tr>
          </thead>
          <tbody>
            {letters.map((letter) => (
              <tr key={letter.group_id}>
                <td>
                  <input
                    type="checkbox"
                    aria-label={`Choose ${plain(letter.group_id)}`}
                    checked={chosen.has(letter.group_id)}
                    onChange={() => toggle(letter.group_id)}
                  />
                </td>
                <th scope="row">{plain(letter.group_id)}</th>
                <td>{plain(letter.reason)}</td>
                <td>{letter.stage}</td>
                <td>{number(letter.num_deliveries)}</td>
                <td>{plain(letter.environment)}</td>
                <td>{plain(letter.task_key)}</td>
                <td>{letter.rewards.map((reward) => number(reward)).join(", ")}</td>
                <td>{number(letter.num_tokens)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {value && letters.length === 0 && <p>The queue has given up no group.</p>}
    </main>
  );
}
