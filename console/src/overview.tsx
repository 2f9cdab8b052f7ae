// The first page: is it learning, is it sound, what does it wait for, what does it say, what was set.

import type { Answer, Message, Now, Overview, Run, StepPart } from "./answers";
import { Chart, colourOf, type Line } from "./chart";
import { isExport } from "./exported";
import { linkTo, useAnswer, useEvents } from "./hooks";
import { bare, Breakable, contentText, duration, number, plain, Problem, Reward, signed } from "./texts";

const VERDICTS: Record<string, [string, string]> = {
  rises: ["Yes, it rises", "good"],
  falls: ["No, it falls", "bad"],
  unclear: ["Cannot be told yet", "open"],
  unknown: ["Nothing to compare yet", "open"],
};
const LOSS_VERDICTS: typeof VERDICTS = {
  ...VERDICTS,
  falls: ["Yes, the loss falls", "good"],
  rises: ["No, the loss rises", "bad"],
};
const MARKS = { true: "✓", false: "✗", null: "?" };

export function OverviewPage({ run, theme }: { run: Run; theme: string }) {
  const path = `runs/${encodeURIComponent(run.name)}`;
  const { value, error } = useAnswer<Overview>(`${path}/overview`, run.progress.num_bytes);
  const now = useNow(path);
  if (error) return <Problem text={error.message} />;
  const { num_bytes, num_bytes_of_run } = run.progress;
  if (!value || (num_bytes === 0 && num_bytes_of_run > 0)) return <main>Reading the run …</main>;
  const lines = linesOf(value);
  return (
    <main class="overview">
      {now && <NowCard now={now} />}
      <Tiles value={value} alarms={now?.alarms ?? []} />
      <div class="columns">
        <div>
          <section class="card">
            {lines.length > 0 ? (
              <Chart
                title={value.learning.is_loss ? "Loss" : "Reward"}
                unit={value.learning.is_loss ? "nats a token" : ""}
                x={value.learning.of.startsWith("warm-start") ? "warm-start step" : "train step"}
                lines={lines}
                upTo={value.has_ended || !value.num_train_steps ? 0 : value.max_train_steps}
                height={205}
                theme={theme}
              />
            ) : (
              <p>
                No reward and no loss is measured yet.{" "}
                <a href={linkTo("curves", { run: run.name })}>Curves</a> have what else there is.
              </p>
            )}
          </section>
          <Answers run={run} value={value} />
        </div>
        <div>
          <Checks value={value} />
          <Trials value={value} theme={theme} />
          <Parts value={value} />
          <Settings value={value} />
        </div>
      </div>
    </main>
  );
}

/** What the run's living stack does; null where there is none, as in an export. */
function useNow(path: string): Now | null {
  const { event } = useEvents<Now | null>(isExport() ? null : `${path}/now`);
  return event ?? null;
}

/** What the stack finds wrong now, and who waits for whom. */
function NowCard({ now: { alarms, blocked } }: { now: Now }) {
  const waits = blocked.filter((each) => each.seconds >= 1);
  if (alarms.length === 0 && waits.length === 0) return null;
  return (
    <section class="card now" aria-label="Now">
      {alarms.map((alarm) => (
        <p class="failure">✗ {plain(alarm)}</p>
      ))}
      {waits.map((each) => (
        <p>{plain(each.text)}</p>
      ))}
    </section>
  );
}

function Tiles({ value, alarms }: { value: Overview; alarms: string[] }) {
  const { learning, checks, parts } = value;
  const [verdict, mood] = (learning.is_loss ? LOSS_VERDICTS : VERDICTS)[learning.verdict];
  const wrong = checks.filter((check) => check.holds === false).map((check) => check.name);
  const known = checks.filter((check) => check.holds !== null);
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  const [longest, ...others] = [...longOnes(parts)].sort((a, b) => b.seconds - a.seconds);
  const share = (part: { name: string; seconds: number }) =>
    `${part.name} ${Math.round((100 * part.seconds) / total)} %`;
  const change = learning.after === null ? null : learning.after - learning.before!;
  const isDone = value.num_train_steps >= value.max_train_steps;
  return (
    <dl class="tiles">
      <Tile question="Is it learning?" mood={mood} says={verdict} id="learning">
        {learning.before !== null && (
          <>
            <b class="figures">
              {number(learning.before, 3)}
              {learning.after !== null && ` → ${number(learning.after, 3)}`}
            </b>{" "}
            {change !== null && signed(change)}
            {learning.low !== null &&
              ` (95 %: ${signed(learning.low, 2)} to ${signed(learning.high!, 2)})`}
            <br />
            {learning.of}
            {learning.num_pairs > 0 && `, ${number(learning.num_pairs)} tasks`}
          </>
        )}
      </Tile>
      <Tile
        question="Is it sound?"
        mood={wrong.length || alarms.length ? "bad" : known.length ? "good" : "open"}
        says={
          wrong.length
            ? `${wrong.length} of ${known.length} do not hold`
            : alarms.length
              ? "Alarm"
              : known.length
                ? "Yes"
                : "Not known yet"
        }
        id="sound"
      >
        {wrong.length || alarms.length
          ? [...wrong, ...alarms].map(plain).join(", ")
          : `${known.length} checks hold${
              known.length < checks.length ? `, ${checks.length - known.length} open` : ""
            }`}
      </Tile>
      <Tile
        question="What does it wait for?"
        mood="open"
        says={longest ? `It ${share(longest)}` : "–"}
        id="waits"
      >
        {longest &&
          [
            ...others.slice(0, NUM_OTHERS).map(share),
            `of ${number(total, 3)} s a mean train step`,
          ].join(", ")}
      </Tile>
      <Tile
        question="How far is it?"
        mood="open"
        says={
          value.max_train_steps
            ? `${number(value.num_train_steps)} of ${number(value.max_train_steps)} train steps`
            : "No train steps"
        }
        id="far"
      >
        {value.has_ended ? (isDone ? "ended" : "ended early") : "not ended"},{" "}
        {number(value.num_trajectories)} trajectories
        {value.wall_s !== null && ` in ${duration(value.wall_s)}`}
      </Tile>
    </dl>
  );
}

const NUM_OTHERS = 2;

type TileProps = { question: string; mood: string; says: string; id: string; children: unknown };

function Tile({ question, mood, says, id, children }: TileProps) {
  return (
    <div class={`tile ${mood}`} id={`tile-${id}`}>
      <dt>{question}</dt>
      <dd>
        <strong>{says}</strong>
        <span>{children as never}</span>
      </dd>
    </div>
  );
}

function linesOf({ learning }: Overview): Line[] {
  const lines = Object.entries(learning.evaluations).map(([label, points], index): Line => {
    const banded = points.every((point) => point.low !== null);
    return {
      label: `${label}${banded ? ", 95 %" : ""}`,
      index,
      xs: points.map((point) => point.train_step),
      ys: points.map((point) => point.value),
      low: banded ? points.map((point) => point.low) : null,
      high: banded ? points.map((point) => point.high) : null,
    };
  });
  const training = {
    label: learning.is_loss ? learning.of.split(",")[0] : "training reward",
    index: 2,
    isFaint: lines.length > 0,
    xs: learning.training.map(([step]) => step),
    ys: learning.training.map(([, value]) => value),
  };
  return training.xs.length ? [...lines, training] : lines;
}

function Answers({ run, value }: { run: Run; value: Overview }) {
  const shared = sharedOf(value.answers.map((each) => each.prompt));
  return (
    <section class="card answers" aria-label="What does it say?">
      <h2>What does it say?</h2>
      {value.answers.length === 0 && (
        <p>
          No task is answered yet. <a href={linkTo("trajectories", { run: run.name })}>All trajectories</a>
        </p>
      )}
      {shared.map((message) => (
        <Said message={message} isPrompt />
      ))}
      {value.answers.map((each) => (
        <article class={each.before ? "" : "once"}>
          <div class="prompt">
            <header>
              <b>{each.kind}</b>, task {plain(each.task_key)}{" "}
              {each.before && (
                <a href={linkTo("trajectory", differences(run, each.after, each.before))}>differ</a>
              )}
            </header>
            <div class="scrolls" tabIndex={0} role="group" aria-label="Prompt">
              {each.prompt.slice(shared.length).map((message) => (
                <Said message={message} isPrompt />
              ))}
            </div>
          </div>
          {each.before && <Side run={run} name="before" answer={each.before} />}
          <Side run={run} name={each.before ? "after" : "now"} answer={each.after} />
        </article>
      ))}
    </section>
  );
}

/** The messages with which all of several prompts begin, but not the whole of any. */
function sharedOf(prompts: Message[][]): Message[] {
  if (prompts.length < 2) return [];
  const texts = prompts.map((messages) => messages.map((message) => JSON.stringify(message)));
  const end = prompts[0].findIndex((_, place) =>
    texts.some((own) => own.length <= place + 1 || own[place] !== texts[0][place]),
  );
  return prompts[0].slice(0, Math.max(0, end));
}

function differences(run: Run, after: Answer, before: Answer): Record<string, string> {
  return { run: run.name, number: `${after.number}`, with: `${before.number}` };
}

function Side({ run, name, answer }: { run: Run; name: string; answer: Answer }) {
  return (
    <div class="side-answer">
      <header>
        <a href={linkTo("trajectory", { run: run.name, number: `${answer.number}` })}>{name}</a>{" "}
        <Reward value={answer.reward} />
      </header>
      <div class="scrolls" tabIndex={0} role="group" aria-label={`Answer ${name}`}>
        {answer.messages.map((message) => (
          <Said message={message} />
        ))}
      </div>
    </div>
  );
}

function Said({ message, isPrompt }: { message: Message; isPrompt?: boolean }) {
  const isOwn = message.role === (isPrompt ? "user" : "assistant");
  return (
    <p class={`said ${message.role}`}>
      {!isOwn && <b>{message.role} </b>}
      {plain(contentText(message.content))}
      {Boolean(message.tool_calls) && <code> {JSON.stringify(message.tool_calls)}</code>}
    </p>
  );
}

function Checks({ value }: { value: Overview }) {
  return (
    <section class="card" aria-label="Is it sound?">
      <h2>Is it sound?</h2>
      <ul class="checks">
        {value.checks.map((check) => (
          <li class={check.holds === false ? "failure" : check.holds ? "good" : ""}>
            <span class="mark" role="img" aria-label={NAMED[`${check.holds}`]}>
              {MARKS[`${check.holds}`]}
            </span>
            <span>
              <b>{check.name}</b> {plain(check.says)}
            </span>
          </li>
        ))}
      </ul>
    </section>
  );
}

const NAMED = { true: "holds", false: "does not hold", null: "open" };

function Trials({ value, theme }: { value: Overview; theme: string }) {
  const all = value.learning.trials;
  // The others are among the curves: one screen has room for two.
  const ends = TRIAL_ENDS.find(([first]) => first in all) ?? Object.keys(all);
  const trials = Object.entries(all).filter(([label]) => ends.includes(label));
  if (trials.length === 0) return null;
  const lines = trials.map(([label, values], index): Line => ({
    label,
    index,
    xs: values.map((_, place) => place + 1),
    ys: values,
  }));
  return (
    <section class="card">
      <Chart title="Reward in a trial" x="episode" lines={lines} height={110} theme={theme} />
    </section>
  );
}

const TRIAL_ENDS = [
  ["before_sampled", "after_sampled"],
  ["first train steps", "last train steps"],
];

/** The parts of a step that take a hundredth of it or more, and the others as one. */
function longOnes(parts: StepPart[]): StepPart[] {
  const total = parts.reduce((sum, part) => sum + part.seconds, 0);
  const long = parts.filter((part) => part.seconds >= 0.01 * total);
  const rest = total - long.reduce((sum, part) => sum + part.seconds, 0);
  return rest > 0 && rest >= 0.01 * total ? [...long, { name: "the rest", seconds: rest }] : long;
}

function Parts({ value }: { value: Overview }) {
  const total = value.parts.reduce((sum, part) => sum + part.seconds, 0);
  const parts = longOnes(value.parts);
  if (total === 0) return null;
  return (
    <section class="card" aria-label="What does it wait for?">
      <h2>
        What does it wait for? <small>the trainer, in a mean step</small>
      </h2>
      <div class="bar" aria-hidden="true">
        {parts.map((part, index) => (
          <i style={{ flexGrow: part.seconds / total, background: colourOf(index) }} />
        ))}
      </div>
      <ul class="parts">
        {parts.map((part, index) => (
          <li>
            <i style={{ background: colourOf(index) }} />
            {part.name} <b>{number(part.seconds, 3)} s</b>
          </li>
        ))}
      </ul>
    </section>
  );
}

function Settings({ value }: { value: Overview }) {
  return (
    <section class="card settings" aria-label="What was set?">
      <h2>
        What was set? <small>{value.settings.length} values that are not the defaults</small>
      </h2>
      <div class="scrolls" tabIndex={0} role="group" aria-label="Settings">
        <table>
          <tbody>
            {value.settings.map((each) => (
              <tr>
                <th scope="row">
                  <Breakable text={each.key} />
                </th>
                <td>
                  <Breakable text={plain(bare(each.value))} />{" "}
                  <small>
                    <Breakable text={plain(bare(each.default)) || "none"} />
                  </small>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
