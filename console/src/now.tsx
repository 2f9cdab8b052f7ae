// What the stack of a run does at this moment: services, training, queue, and who waits for whom.

import { useState } from "preact/hooks";
import type { Now, Run, Value } from "./answers";
import { post } from "./api";
import { useEvents, useKeys } from "./hooks";
import { moment, number, plain, Problem } from "./texts";

export function NowPage({ run }: { run: Run }) {
  const path = `runs/${encodeURIComponent(run.name)}`;
  const { event: now, error } = useEvents<Now | null>(`${path}/now`);
  const [refusal, setRefusal] = useState("");
  const isPaused = now?.trainer?.phase === "paused";
  const act = () => {
    if (!now?.trainer) return;
    post(`${path}/${isPaused ? "resume" : "pause"}`, {})
      .then(() => setRefusal(""))
      .catch((failure) => setRefusal(failure.message));
  };
  useKeys({ "!": act });
  return (
    <main>
      {error && <Problem text={error} />}
      {refusal && <Problem text={refusal} />}
      {now === null && (
        <p id="no-stack">No stack serves this run now. Its other pages show what it did.</p>
      )}
      {now && (
        <>
          <p class="count" aria-live="polite">
            <span id="health">{now.is_healthy ? "All services serve" : "Not all services serve"}</span>
            , pid {now.pid}, {moment(now.time)}
            <button type="button" onClick={act} disabled={!now.trainer}>
              {isPaused ? "Resume training" : "Pause training"} <kbd>!</kbd>
            </button>
          </p>
          {now.alarms.length > 0 && (
            <ul class="failure" id="alarms" role="alert">
              {now.alarms.map((alarm) => (
                <li>{plain(alarm)}</li>
              ))}
            </ul>
          )}
          <Services now={now} />
          <Waits now={now} />
          <Training now={now} />
          <Queue now={now} />
        </>
      )}
    </main>
  );
}

function Services({ now }: { now: Now }) {
  return (
    <>
      <h2>Services</h2>
      <div class="scroll" tabIndex={0} role="group" aria-label="Services">
        <table id="services">
          <thead>
            <tr>
              {["service", "health", "since", "incarnation", "pid", "restarts", "gRPC", "REST", "policy", "requests", "busy"].map(
                (title) => (
                  <th>{title}</th>
                ),
              )}
            </tr>
          </thead>
          <tbody>
            {now.services.map((each) => {
              const replica = now.replicas[each.name];
              return (
                <tr key={each.name}>
                  <th scope="row">{each.name}</th>
                  <td class={each.health === "serving" ? "" : "failure"}>
                    {each.health === "serving" ? "✓ " : "✗ "}
                    {each.health}
                  </td>
                  <td>{each.silent_s >= 1 ? `${number(Math.round(each.silent_s))} s` : ""}</td>
                  <td>{each.incarnation || "–"}</td>
                  <td>{each.process.pid ?? "–"}</td>
                  <td>{number(each.process.num_restarts)}</td>
                  <td>{each.address || "–"}</td>
                  <td>{each.rest_address || "–"}</td>
                  <td>{replica ? plain(replica.policy_version) : ""}</td>
                  <td>{replica ? number(replica.num_requests_running) : ""}</td>
                  <td>{replica ? share(replica.busy_share) : ""}</td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
    </>
  );
}

function Waits({ now }: { now: Now }) {
  return (
    <>
      <h2>Who waits for whom</h2>
      {now.blocked.length === 0 ? (
        <p>Nobody waits.</p>
      ) : (
        <table id="waits">
          <thead>
            <tr>
              {["waits", "for", "what", "calls", "since", "because"].map((title) => (
                <th>{title}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {now.blocked.map((each) => (
              <tr class={each.is_stall ? "failure" : ""}>
                <th scope="row">{each.waiter}</th>
                <td>{each.target}</td>
                <td>{each.what}</td>
                <td>{number(each.count)}</td>
                <td>{number(each.seconds, 2)} s</td>
                <td>{each.because.join(" ← ")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  );
}

function Training({ now }: { now: Now }) {
  const trainer = now.trainer;
  const facts: [string, string][] = trainer
    ? [
        ["phase", trainer.phase],
        ["train steps", `${number(trainer.num_train_steps)} of ${number(trainer.max_train_steps)}`],
        ["policy", trainer.policy_version || "not published yet"],
        ["reward", number(trainer.metrics["train/reward"])],
        ["staleness, mean", number(trainer.metrics["train/staleness_mean"])],
        ["trainer computes", `${share(trainer.busy_share)} of the step`],
        ["last step", parts(trainer.metrics)],
      ]
    : [["trainer", "does not answer"]];
  const rate = now.sampled_tokens_per_s;
  facts.push(["sampled", rate === null ? "–" : `${number(Math.round(rate))} tokens/s`]);
  if (trainer?.failure) facts.push(["failure", trainer.failure]);
  return (
    <>
      <h2>Training</h2>
      <Facts id="training" facts={facts} />
    </>
  );
}

function Queue({ now }: { now: Now }) {
  const queue = now.queue;
  if (!queue) {
    return (
      <>
        <h2>Queue</h2>
        <p class="failure">The replay service does not answer.</p>
      </>
    );
  }
  const dropped = Object.entries(queue.dropped).map(([reason, count]) => `${reason} ${count}`);
  return (
    <>
      <h2>Queue</h2>
      <table id="queue">
        <thead>
          <tr>
            <th>groups</th>
            {Object.keys(queue.training).map((place) => (
              <th>{place}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {(["training", "evaluation"] as const).map((purpose) => (
            <tr>
              <th scope="row">{purpose}</th>
              {Object.values(queue[purpose]).map((count) => (
                <td>{number(count)}</td>
              ))}
            </tr>
          ))}
          {(["training", "evaluation"] as const).map((purpose) => (
            <tr>
              <th scope="row">{purpose}, age of the oldest</th>
              {Object.keys(queue[purpose]).map((place) => (
                <td>{age(queue.oldest_s[purpose][place])}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      <Facts
        id="credits"
        facts={[
          ["credits", `${number(queue.credits)} of ${number(queue.max_outstanding_groups)}`],
          ["dropped", dropped.join(", ") || "none"],
          ["dead letters", number(queue.num_dead_letters)],
          ["delivered again", number(queue.num_redelivered)],
          ["store", `${queue.store}${queue.is_full ? ", its memory is nearly used up" : ""}`],
        ]}
      />
    </>
  );
}

function Facts({ id, facts }: { id: string; facts: [string, string][] }) {
  return (
    <dl class="facts" id={id}>
      {facts.map(([name, value]) => (
        <div>
          <dt>{name}</dt>
          <dd>{plain(value)}</dd>
        </div>
      ))}
    </dl>
  );
}

/** What the newest train step spent its time on. */
function parts(metrics: Record<string, Value>): string {
  const names: [string, string][] = [
    ["lease_s", "waited for groups"],
    ["rows_s", "read them"],
    ["prepare_s", "prepared"],
    ["forward_backward_s", "forward and backward"],
    ["optim_s", "optimiser"],
    ["wait_s", "waited for the publish before"],
    ["capture_s", "copied the weights"],
    ["publish_s", metrics["train/capture_s"] ? "published beside the next" : "published"],
  ];
  const told = names.filter(([name]) => metrics[`train/${name}`] !== undefined);
  return (
    told.map(([name, what]) => `${what} ${number(metrics[`train/${name}`], 2)} s`).join(", ") || "–"
  );
}

function share(value: number | null): string {
  return value === null ? "–" : `${Math.round(100 * value)} %`;
}

function age(seconds: number | undefined): string {
  return seconds === undefined ? "" : `${number(Math.round(seconds))} s`;
}
