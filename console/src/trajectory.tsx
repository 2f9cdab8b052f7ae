// One trajectory: its group side by side, its messages by turn, and its tokens.

import type { Member, Message, Page, Run, Trajectory } from "./answers";
import { query } from "./api";
import { ForkTree } from "./forks";
import { change, go, linkTo, useAnswer, useKeys, type Address } from "./hooks";
import { contentText, number, plain, policy, Problem } from "./texts";
import { TokenMap } from "./tokens";
import { FILTERS } from "./trajectories";

export function TrajectoryPage({ run, address }: { run: Run; address: Address }) {
  const chosen = address.values.get("number") ?? "1";
  const base = `runs/${encodeURIComponent(run.name)}`;
  const path = `${base}/trajectories/${encodeURIComponent(chosen)}`;
  const { value, error } = useAnswer<Trajectory>(path);
  const group = useAnswer<{ total: number; members: Member[] }>(`${path}/group`);
  const list = new URLSearchParams(address.values.get("list") ?? "");
  const neighbours = useNeighbours(base, list, Number(chosen));
  const show = (target: number | null) => {
    if (target !== null) change({ number: `${target}`, token: "", sequence: "", start: "" });
  };
  const members = group.value?.members ?? [];
  const place = members.findIndex((member) => `${member.summary.number}` === chosen);
  const inGroup = (by: number) => {
    const member = members[(place + by + members.length) % Math.max(1, members.length)];
    if (member) show(member.summary.number);
  };
  const back = () => {
    const values = new URLSearchParams(list);
    values.set("run", run.name);
    go("trajectories", values);
  };
  useKeys({
    j: () => show(neighbours.next),
    k: () => show(neighbours.previous),
    g: () => inGroup(1),
    G: () => inGroup(-1),
    u: back,
    Escape: back,
  });
  if (error) return <Problem text={error.message} />;
  if (!value || `${value.summary.number}` !== chosen) return <p>Loading …</p>;
  const { summary } = value;
  return (
    <main>
      <h1>
        Trajectory {summary.number} <small>{summary.trajectory_id}</small>
      </h1>
      <dl class="facts">
        <Fact name="task" value={plain(summary.task_key)} />
        <Fact name="environment" value={summary.environment} />
        <Fact name="outcome" value={[summary.outcome, summary.label].filter(Boolean).join(", ")} />
        <Fact name="train step" value={number(summary.train_step)} />
        <Fact name="reward" value={number(summary.reward)} />
        <Fact name="advantage" value={number(summary.advantage)} />
        <Fact name="policy" value={policy(summary)} />
        <Fact name="staleness" value={number(summary.staleness)} />
        <Fact name="ended" value={summary.done_reason.toLowerCase()} />
        <Fact name="tokens" value={`${summary.num_sampled} sampled of ${summary.num_tokens}`} />
        <Fact name="temperature" value={number((value.temperature ?? null) as number | null)} />
      </dl>
      {value.failures?.map((failure) => (
        <p class="failure">
          {failure.owner.toLowerCase()} failed: {failure.reason}: {plain(failure.message)}
        </p>
      ))}
      {members.length > 1 && (
        <section aria-label="Group">
          <h2>
            Group of {group.value?.total} <small>{plain(summary.group_id)}</small>
          </h2>
          <div class="members">
            {members.map((member) => (
              <a
                key={member.summary.number}
                class={`member ${member.summary.number === summary.number ? "chosen" : ""}`}
                aria-current={member.summary.number === summary.number}
                href={linkTo("trajectory", {
                  ...Object.fromEntries(address.values),
                  number: `${member.summary.number}`,
                  token: "",
                  start: "",
                  sequence: "",
                })}
              >
                <span class="numbers">
                  reward <b>{number(member.summary.reward)}</b> advantage{" "}
                  <b>{number(member.summary.advantage)}</b>
                </span>
                <span class="answer">
                  {member.messages
                    .filter((message) => message.role !== "user" && message.role !== "system")
                    .map((message) => `${message.role}: ${plain(contentText(message.content))}`)
                    .join("\n")}
                </span>
              </a>
            ))}
          </div>
        </section>
      )}
      <section aria-label="Messages">
        <h2>Messages</h2>
        <Messages trajectory={value} />
      </section>
      {value.sequences.length > 1 && <ForkTree key={`${path}/forks`} path={path} address={address} />}
      <TokenMap key={path} path={path} sequences={value.sequences} address={address} />
    </main>
  );
}

/** The numbers before and after this one in the list that it was opened from. */
function useNeighbours(base: string, list: URLSearchParams, chosen: number) {
  const values = FILTERS.map((name): [string, string] => [name, list.get(name) ?? ""]);
  const page = query([
    ...values,
    ["sort", list.get("sort") ?? "-number"],
    ["offset", list.get("offset") ?? ""],
    ["limit", "50"],
  ]);
  const numbers = useAnswer<Page>(`${base}/trajectories?${page}`).value?.summaries ?? [];
  const place = numbers.findIndex((summary) => summary.number === chosen);
  if (place < 0) return { next: chosen + 1, previous: chosen > 1 ? chosen - 1 : null };
  return {
    next: numbers[place + 1]?.number ?? null,
    previous: numbers[place - 1]?.number ?? null,
  };
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function Messages({ trajectory }: { trajectory: Trajectory }) {
  const turns = trajectory.turns ?? [];
  const startsAt = new Map(turns.map((turn, index) => [turn.message_start, index]));
  return (
    <ol class="messages">
      {trajectory.messages.map((message, index) => {
        const turn = startsAt.get(index);
        return (
          <li class={`message ${message.role}`}>
            <header>
              <b>{message.role}</b>
              {turn !== undefined && (
                <span>
                  turn {turn + 1}, {(turns[turn].stop_reason ?? "").toLowerCase()}
                  {Object.entries(turns[turn].rewards ?? {}).map(
                    ([name, value]) => `, ${name} ${number(value as number)}`,
                  )}
                </span>
              )}
            </header>
            <pre>{plain(contentText(message.content))}</pre>
            <Extras message={message} />
          </li>
        );
      })}
    </ol>
  );
}

function Extras({ message }: { message: Message }) {
  const extras = Object.entries(message).filter(
    ([name, value]) => name !== "role" && name !== "content" && value,
  );
  return (
    <>
      {extras.map(([name, value]) => (
        <details>
          <summary>{name}</summary>
          <pre>{plain(typeof value === "string" ? value : JSON.stringify(value, null, 1))}</pre>
        </details>
      ))}
    </>
  );
}
