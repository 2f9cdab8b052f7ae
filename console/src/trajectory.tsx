// One trajectory as a person reads it: a conversation, its rewards, its group, and its tokens.

import { diffWordsWithSpace } from "diff";
import type { Member, Message, Page, Run, Summary, Tokens, Trajectory } from "./answers";
import { query } from "./api";
import { ForkTree } from "./forks";
import { change, go, linkTo, useAnswer, useKeys, type Address } from "./hooks";
import { contentText, number, plain, policy, Problem, Reward } from "./texts";
import { ColourChoice, Numbers, Spans, TokenMap, useTokens } from "./tokens";
import { FILTERS } from "./trajectories";

export function TrajectoryPage({ run, address }: { run: Run; address: Address }) {
  const { values } = address;
  const chosen = values.get("number") ?? "1";
  const base = `runs/${encodeURIComponent(run.name)}`;
  const path = `${base}/trajectories/${encodeURIComponent(chosen)}`;
  const { value, error } = useAnswer<Trajectory>(path);
  const group = useAnswer<{ total: number; members: Member[] }>(`${path}/group`);
  const tokens = useTokens(path, address, value?.sequences.length ?? 1);
  const list = new URLSearchParams(values.get("list") ?? "");
  const neighbours = useNeighbours(base, list, Number(chosen));
  const others = useOthers(base, value?.summary);
  const show = (target: number | null) => {
    if (target !== null) {
      change({ number: `${target}`, token: "", sequence: "", start: "", with: "" });
    }
  };
  const members = group.value?.members ?? [];
  const place = members.findIndex((member) => `${member.summary.number}` === chosen);
  const inGroup = (by: number) => {
    const member = members[(place + by + members.length) % Math.max(1, members.length)];
    if (member) show(member.summary.number);
  };
  const back = () => {
    const next = new URLSearchParams(list);
    next.set("run", run.name);
    go("trajectories", next);
  };
  const compared = values.get("with") ?? "";
  const compare = () => change({ with: compared || !others.length ? "" : `${others[0].number}` });
  useKeys({
    j: () => show(neighbours.next),
    k: () => show(neighbours.previous),
    g: () => inGroup(1),
    G: () => inGroup(-1),
    c: compare,
    u: back,
    Escape: back,
  });
  if (error) return <Problem text={error.message} />;
  if (!value || `${value.summary.number}` !== chosen) return <main>Loading …</main>;
  const { summary } = value;
  return (
    <main>
      <div class="title">
        <button type="button" onClick={back}>
          List <kbd>u</kbd>
        </button>
        <h1>
          Trajectory {summary.number} <Reward value={summary.reward} />{" "}
          <small>
            task {plain(summary.task_key)}, {[summary.outcome, summary.label].join(", ")},{" "}
            {policy(summary)}
          </small>
        </h1>
        <span class="space" />
        <button
          type="button"
          disabled={neighbours.previous === null}
          onClick={() => show(neighbours.previous)}
        >
          Previous <kbd>k</kbd>
        </button>
        <button type="button" disabled={neighbours.next === null} onClick={() => show(neighbours.next)}>
          Next <kbd>j</kbd>
        </button>
      </div>
      <div class="reader">
        <div>
          <div class="controls">
            <ColourChoice address={address} sequences={value.sequences} />
            <span class="space" />
            <label>
              Compare with <kbd>c</kbd>{" "}
              <select
                id="with"
                value={compared}
                onChange={(event) => change({ with: event.currentTarget.value })}
              >
                <option value="">nothing</option>
                {others.map((each) => (
                  <option value={`${each.number}`}>
                    #{each.number} {each.label} {policy(each)}, reward {number(each.reward, 3)}
                  </option>
                ))}
              </select>
            </label>
          </div>
          {tokens.error && <Problem text={tokens.error} />}
          {value.failures?.map((failure) => (
            <p class="failure">
              {failure.owner.toLowerCase()} failed: {failure.reason}: {plain(failure.message)}
            </p>
          ))}
          {compared ? (
            <Differences base={base} other={compared} trajectory={value} />
          ) : (
            <Messages trajectory={value} tokens={tokens.value} address={address} />
          )}
          {value.sequences.length > 1 && (
            <ForkTree key={`${path}/forks`} path={path} address={address} />
          )}
          {tokens.value && <TokenMap tokens={tokens.value} state={tokens} address={address} />}
        </div>
        <aside aria-label="Facts">
          <Facts trajectory={value} />
          {tokens.value && <Numbers tokens={tokens.value} token={tokens.shown} />}
          {members.length > 1 && (
            <Group members={members} total={group.value?.total ?? 0} own={summary} address={address} />
          )}
        </aside>
      </div>
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

/** The other answers to the same task, those of another policy first. */
function useOthers(base: string, own: Summary | undefined): Summary[] {
  const asked = query([
    ["task_key", own?.task_key ?? ""],
    ["environment", own?.environment ?? ""],
    ["sort", "number"],
    ["limit", "100"],
  ]);
  const page = useAnswer<Page>(own?.task_key ? `${base}/trajectories?${asked}` : null).value;
  const others = (page?.summaries ?? []).filter((each) => each.number !== own?.number);
  const isSame = (each: Summary) => Number(each.newest === own?.newest);
  return others.sort((a, b) => isSame(a) - isSame(b));
}

function Facts({ trajectory }: { trajectory: Trajectory }) {
  const { summary } = trajectory;
  const given = new Map<string, number>();
  for (const turn of trajectory.turns ?? []) {
    for (const [name, value] of Object.entries(turn.rewards ?? {})) {
      given.set(name, (given.get(name) ?? 0) + Number(value));
    }
  }
  const facts: [string, string][] = [
    ["environment", summary.environment],
    ["train step", number(summary.train_step)],
    ["advantage", number(summary.advantage)],
    ["staleness", number(summary.staleness)],
    ["ended", summary.done_reason.toLowerCase()],
    ["tokens", `${number(summary.num_sampled)} sampled of ${number(summary.num_tokens)}`],
    ["tool calls", number(summary.num_tool_calls)],
    ["temperature", number((trajectory.temperature ?? null) as number | null)],
    ["id", summary.trajectory_id],
  ];
  return (
    <section class="card">
      {given.size > 0 && (
        <p class="controls" aria-label="Rewards by who gave them">
          {[...given].map(([name, value]) => (
            <Reward name={name} value={value} />
          ))}
        </p>
      )}
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div>
            <dt>{name}</dt>
            <dd>{plain(value)}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

type GroupProps = { members: Member[]; total: number; own: Summary; address: Address };

function Group({ members, total, own, address }: GroupProps) {
  return (
    <section class="card" aria-label="Group">
      <h2>
        Group of {total} <kbd>g</kbd> <small>{plain(own.group_id)}</small>
      </h2>
      <div class="members">
        {members.map((member) => (
          <a
            key={member.summary.number}
            class={`member ${member.summary.number === own.number ? "chosen" : ""}`}
            aria-current={member.summary.number === own.number}
            href={linkTo("trajectory", {
              ...Object.fromEntries(address.values),
              number: `${member.summary.number}`,
              token: "",
              start: "",
              sequence: "",
              with: "",
            })}
          >
            <Reward value={member.summary.reward} name="reward" />{" "}
            <span class="numbers">advantage {number(member.summary.advantage)}</span>
            <span class="answer">{plain(answerOf(member.messages).trim())}</span>
          </a>
        ))}
      </div>
    </section>
  );
}

/** What follows the prompt, as one text. */
function answerOf(messages: Message[]): string {
  const begin = messages.findIndex((message) => message.role === "assistant");
  return messages
    .slice(begin < 0 ? messages.length : begin)
    .map((message) => {
      const text = contentText(message.content);
      return message.role === "assistant" ? text : `[${message.role}] ${text}`;
    })
    .join("\n");
}

type DifferencesProps = { base: string; other: string; trajectory: Trajectory };

/** Two answers to one task side by side: what only the left one has, and only the right one. */
function Differences({ base, other, trajectory }: DifferencesProps) {
  const { value, error } = useAnswer<Trajectory>(
    `${base}/trajectories/${encodeURIComponent(other)}`,
  );
  if (error) return <Problem text={error.message} />;
  if (!value) return <p>Loading …</p>;
  const parts = diffWordsWithSpace(
    plain(answerOf(value.messages)),
    plain(answerOf(trajectory.messages)),
  );
  const prompt = trajectory.messages.filter((message) => message.role !== "assistant")[0];
  const [its, own] = [value.summary, trajectory.summary].map(
    (each) => `${each.environment}, task ${each.task_key}`,
  );
  return (
    <section aria-label="Differences">
      {its !== own && (
        <Problem
          text={plain(`#${other} answers another task (${its}) than this one (${own}): its text is no other answer.`)}
        />
      )}
      {prompt && (
        <div class={`message ${prompt.role}`}>
          <b>{prompt.role}</b>
          <pre>{plain(contentText(prompt.content))}</pre>
        </div>
      )}
      <div class="versions">
        <div class="card">
          <Versioned summary={value.summary} />
          <pre>{parts.map((part) => !part.added && (part.removed ? <del>{part.value}</del> : part.value))}</pre>
        </div>
        <div class="card">
          <Versioned summary={trajectory.summary} />
          <pre>{parts.map((part) => !part.removed && (part.added ? <ins>{part.value}</ins> : part.value))}</pre>
        </div>
      </div>
    </section>
  );
}

function Versioned({ summary }: { summary: Summary }) {
  return (
    <h2>
      #{summary.number} {policy(summary)} <Reward value={summary.reward} />{" "}
      <small>{summary.label}</small>
    </h2>
  );
}

type MessagesProps = { trajectory: Trajectory; tokens: Tokens | null; address: Address };

function Messages({ trajectory, tokens, address }: MessagesProps) {
  const turns = trajectory.turns ?? [];
  const startsAt = new Map(turns.map((turn, index) => [turn.message_start, index]));
  const mode = address.values.get("by") ?? "";
  return (
    <ol class="messages" aria-label="Messages">
      {trajectory.messages.map((message, index) => {
        const turn = startsAt.get(index);
        const text = plain(contentText(message.content));
        const own = mode && tokens ? sampledOf(tokens, index) : [];
        const body =
          own.length > 0 && tokens ? (
            <div class="tokens">
              <Spans tokens={tokens} mode={mode} pinned={null} places={own} />
            </div>
          ) : (
            <pre>{text}</pre>
          );
        return (
          <li class={`message ${message.role}`}>
            <header>
              <b>{message.role}</b>
              {turn !== undefined && (
                <>
                  <span>
                    turn {turn + 1}, {(turns[turn].stop_reason ?? "").toLowerCase()}
                  </span>
                  {Object.entries(turns[turn].rewards ?? {}).map(([name, value]) => (
                    <Reward name={name} value={value as number} />
                  ))}
                </>
              )}
            </header>
            {message.role === "tool" || (message.role === "system" && text.length > FOLDED) ? (
              <details>
                <summary>{text.split("\n")[0].slice(0, 100)}</summary>
                {body}
              </details>
            ) : (
              body
            )}
            <Extras message={message} />
            {Object.entries(turns[turn ?? -1]?.feedback ?? {}).map(([name, said]) => (
              <p class="feedback">
                <b>{plain(name)}</b> {plain(said)}
              </p>
            ))}
          </li>
        );
      })}
    </ol>
  );
}

const FOLDED = 400; // a system message of more characters is folded

/** The places of the tokens that were sampled for a message. */
function sampledOf(tokens: Tokens, message: number): number[] {
  return tokens.ids.flatMap((_, place) =>
    tokens.messages[place] === message && tokens.sources[place] === "MODEL" ? [place] : [],
  );
}

function Extras({ message }: { message: Message }) {
  const extras = Object.entries(message).filter(
    ([name, value]) => !["role", "content", "is_complete"].includes(name) && value,
  );
  return (
    <>
      {message.is_complete === false && <small>cut off here</small>}
      {extras.map(([name, value]) => (
        <details>
          <summary>{name}</summary>
          <pre>{plain(typeof value === "string" ? value : JSON.stringify(value, null, 1))}</pre>
        </details>
      ))}
    </>
  );
}
