// The policies that a run published, newest first.

import { useState } from "preact/hooks";
import type { Publishes, Run, Value } from "./answers";
import { linkTo, useAnswer, useKeys } from "./hooks";
import { bytes, moment, number, plain, Problem } from "./texts";

const PAGE = 100;

export function Weights({ run }: { run: Run }) {
  const path = `runs/${encodeURIComponent(run.name)}/publishes`;
  const { value, error } = useAnswer<Publishes>(path, run.progress.num_bytes);
  const [start, setStart] = useState(0);
  const newest = [...(value?.publishes ?? [])].reverse();
  const bound = value?.bound ?? null;
  const turn = (by: number) => {
    const next = start + by * PAGE;
    if (next >= 0 && next < newest.length) setStart(next);
  };
  useKeys({ n: () => turn(1), p: () => turn(-1) });
  const failed = newest.filter((each) => proof(each.max_logprob_difference, bound) === false);
  return (
    <main>
      {error && <Problem text={error.message} />}
      <p class="count" aria-live="polite">
        <span id="total">{number(newest.length)}</span> publishes
        {newest.length > 0 && bound !== null && `, ${failed.length} beyond the bound of ${number(bound)}`}
        <button type="button" onClick={() => turn(-1)} disabled={start === 0}>
          Previous
        </button>
        <button type="button" onClick={() => turn(1)} disabled={start + PAGE >= newest.length}>
          Next
        </button>
      </p>
      <p>
        The proof of a publish is the largest difference, in nats, between the trainer's and any
        replica's log-probs of the probe prompts.
      </p>
      <div class="scroll" tabIndex={0} role="group" aria-label="Publishes">
        <table class="weights">
          <thead>
            <tr>
              {["policy", "train step", "time", "size", "seconds", "replicas", "proof", "on disk"].map(
                (title) => (
                  <th>{title}</th>
                ),
              )}
            </tr>
          </thead>
          <tbody>
            {newest.slice(start, start + PAGE).map((each) => {
              const isProven = proof(each.max_logprob_difference, bound);
              return (
                <tr key={`${each.lineage}-${each.policy_version}`}>
                  <th scope="row">
                    <a href={linkTo("trajectories", sampledBy(run, each.policy_version))}>
                      {plain(each.lineage)}-{each.policy_version}
                    </a>
                  </th>
                  <td>{each.train_step}</td>
                  <td>{moment(each.time)}</td>
                  <td>{bytes(each.num_bytes)}</td>
                  <td>{number(each.publish_s, 3)}</td>
                  <td>{number(each.num_replicas)}</td>
                  <td class={isProven === false ? "failure" : ""}>
                    {number(each.max_logprob_difference, 3)}
                    {isProven === null ? "" : isProven ? " ✓" : " ✗ beyond the bound"}
                  </td>
                  <td>{each.is_on_disk ? "yes" : "no"}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {value && newest.length === 0 && <p>The run has published nothing yet.</p>}
    </main>
  );
}

/** Whether the difference is within the bound; null where one of the two is unknown. */
function proof(difference: Value, bound: number | null): boolean | null {
  if (difference === null || bound === null) return null;
  return typeof difference === "number" && difference <= bound;
}

/** The list of what this version sampled. */
function sampledBy(run: Run, version: number | null): Record<string, string> {
  return { run: run.name, ...(version !== null && { version: `${version}` }) };
}
