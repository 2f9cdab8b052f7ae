// A chart: lines with bands over one x, a legend, what the pointer is over, and its picture or CSV.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { Value } from "./answers";
import { Breakable, number } from "./texts";

// The theme's colours of lines, made of Okabe and Ito's, which people with any colour vision tell
// apart; lines differ in their dashes as well.
const NUM_COLOURS = 6;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 5]];

/** The dash of a line: those of one colour have different ones. */
function dashOf(index: number): number[] {
  return DASHES[(index + Math.floor(index / NUM_COLOURS)) % DASHES.length];
}

export function colourOf(index: number): string {
  return `var(--line-${index % NUM_COLOURS})`;
}

export type Line = {
  label: string;
  xs: (number | null)[];
  ys: Value[];
  low?: (number | null)[] | null;
  high?: (number | null)[] | null;
  index: number; // of its colour and dash
  isFaint?: boolean;
};
type Props = {
  title: string;
  lines: Line[];
  x: string;
  unit?: string;
  height?: number;
  isLog?: boolean;
  note?: string;
  upTo?: number; // the x to which the axis goes at least
  theme: string;
};

export function Chart(props: Props) {
  const { title, lines, x, unit = "", note = "", height = 220, isLog = false } = props;
  const { upTo = 0, theme } = props;
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [at, setAt] = useState<{ index: number; left: number } | null>(null);
  const shown = lines.filter((line) => line.ys.some((value) => typeof value === "number"));
  const data = columnsOf(shown);
  const key = JSON.stringify([data, isLog, upTo, theme, height, x, unit]);
  useEffect(() => {
    const element = place.current;
    if (!element || shown.length === 0) return;
    const chart = new uPlot(optionsOf(element, shown, height, isLog, upTo, setAt), data, element);
    plot.current = chart;
    const resize = new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height }));
    resize.observe(element);
    return () => {
      resize.disconnect();
      chart.destroy();
      plot.current = null;
    };
  }, [key]);
  const last = shown.map((line) => `${line.label}: ${number(line.ys[line.ys.length - 1])}`);
  return (
    <section class="chart" aria-label={title}>
        <header>
          <h2>
            <Breakable text={title} /> {unit && <small>{unit}</small>}
          </h2>
          <button type="button" onClick={() => saveCsv(title, x, shown)} disabled={!shown.length}>
            CSV
          </button>
          <button
            type="button"
            onClick={() => plot.current && savePicture(title, plot.current, shown)}
            disabled={!shown.length}
          >
            PNG
          </button>
        </header>
      <ul class="legend">
        {shown.map((line) => (
          <li>
            <svg width="22" height="8" aria-hidden="true">
              <line
                x1="0"
                x2="22"
                y1="4"
                y2="4"
                style={{ stroke: colourOf(line.index) }}
                stroke-width={line.isFaint ? 1.5 : 2.5}
                stroke-dasharray={dashOf(line.index).join(" ")}
              />
            </svg>
            {line.label} <b>{number(line.ys[line.ys.length - 1])}</b>
          </li>
        ))}
      </ul>
      {note && <small>{note}</small>}
      <p class="last">{last.join(", ") || "no values"}</p>
      <div
        class="plot"
        ref={place}
        role="img"
        aria-label={`${title} over ${x}${unit && `, in ${unit}`}. Newest: ${last.join(", ")}`}
      >
        {at && <Tip at={at} data={data} lines={shown} x={x} unit={unit} />}
      </div>
      <p class="axis-title">{x}</p>
    </section>
  );
}

type TipProps = {
  at: { index: number; left: number };
  data: uPlot.AlignedData;
  lines: Line[];
  x: string;
  unit: string;
};

function Tip({ at, data, lines, x, unit }: TipProps) {
  const rows = lines.flatMap((line, place) => {
    const value = data[1 + 3 * place][at.index];
    if (value === null || value === undefined) return [];
    const [low, high] = [data[2 + 3 * place][at.index], data[3 + 3 * place][at.index]];
    const band = typeof low === "number" ? ` (${number(low, 3)} to ${number(high, 3)})` : "";
    return [{ line, text: `${number(value, 5)} ${unit}${band}` }];
  });
  if (rows.length === 0) return null;
  return (
    <div class="tip" style={at.left < 0 ? { right: `${-at.left}px` } : { left: `${at.left}px` }}>
      <b>
        {x} {number(data[0][at.index], 6)}
      </b>
      {rows.map(({ line, text }) => (
        <span>
          <i style={{ background: colourOf(line.index) }} /> {line.label} {text}
        </span>
      ))}
    </div>
  );
}

function optionsOf(
  element: HTMLElement,
  lines: Line[],
  height: number,
  isLog: boolean,
  upTo: number,
  setAt: (at: { index: number; left: number } | null) => void,
): uPlot.Options {
  const style = getComputedStyle(document.documentElement);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const axis: uPlot.Axis = {
    stroke: colour("--dim"),
    font: "12px system-ui, sans-serif",
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
    values: (_, splits) => splits.map((value) => (value === null ? "" : number(value, 3))),
  };
  const powers = (_: uPlot, splits: number[]) =>
    splits.map((value) => (Number.isInteger(Math.log10(value)) ? value : null));
  const areWhole = lines.every((line) => line.xs.every((x) => x === null || Number.isInteger(x)));
  return {
    width: element.clientWidth || 600,
    height,
    legend: { show: false },
    cursor: { points: { size: 7 }, drag: { x: true, y: false } },
    scales: {
      x: { time: false, range: (chart, low, high) => padded(chart, low, high, upTo) },
      y: { distr: isLog ? 3 : 1, ...(!isLog && { range: (_, low, high) => ends(low, high) }) },
    },
    axes: [
      { ...axis, size: 28, ...(areWhole && { incrs: WHOLE }) },
      {
        ...axis,
        size: 52,
        ...(isLog && { filter: powers, grid: { ...axis.grid, filter: powers } }),
      },
    ],
    series: [
      {},
      ...lines.flatMap((line): uPlot.Series[] => {
        const stroke = colour(`--line-${line.index % NUM_COLOURS}`);
        const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        return [
          {
            stroke,
            dash: dashOf(line.index),
            width: line.isFaint ? 1.25 : 2.25,
            spanGaps: true,
            points: { show: !line.isFaint && line.ys.length < 60, size: 7, fill: stroke },
          },
          edge,
          edge,
        ];
      }),
    ],
    bands: lines.flatMap((line, place) =>
      line.low && line.high
        ? [
            {
              series: [3 + 3 * place, 2 + 3 * place] as [number, number],
              fill: `${colour(`--line-${line.index % NUM_COLOURS}`)}2e`,
            },
          ]
        : [],
    ),
    hooks: {
      setCursor: [
        (chart) => {
          const { idx, left = -1 } = chart.cursor;
          if (idx === null || idx === undefined || left < 0) return setAt(null);
          const begin = chart.over.offsetLeft;
          const isRight = left > chart.over.clientWidth / 2;
          const end = element.clientWidth - begin - left + 14;
          setAt({ index: idx, left: isRight ? -end : begin + left + 14 });
        },
      ],
    },
  };
}

const WHOLE = [1, 10, 100, 1000, 1e4, 1e5, 1e6, 1e7].flatMap((n) => [n, 2 * n, 5 * n]);

/** Return the ends of the x axis. uPlot makes a wide one of a single place, and none of no place. */
function padded(chart: uPlot, low: number, high: number, upTo: number): [number, number] {
  const xs = chart.data[0];
  const isWhole = low <= xs[0] && high >= xs[xs.length - 1]; // and not what somebody chose
  const [first, last] = isWhole ? [xs[0], Math.max(upTo, xs[xs.length - 1])] : [low, high];
  const room = last > first ? 0.02 * (last - first) : 1;
  return [first - room, last + room];
}

/** Return the ends of the y axis: with 0 where that costs less than half of the height. */
function ends(low: number | null, high: number | null): [number, number] {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? 0.08 * (high - low) : Math.max(0.5, Math.abs(high) / 2);
  return [low >= 0 && low - room < high / 2 ? 0 : low - room, high + room];
}

/** Return uPlot's columns: all x in order, then each line's values, lows and highs there. */
function columnsOf(lines: Line[]): uPlot.AlignedData {
  const columns = lines.flatMap((line) =>
    [line.ys, line.low ?? [], line.high ?? []].map(
      // Of equal x the last counts.
      (values) => new Map(line.xs.map((x, index) => [x, values[index]])),
    ),
  );
  const all = new Set(lines.flatMap((line) => line.xs));
  const xs = [...all].filter((x): x is number => x !== null).sort((a, b) => a - b);
  return [
    xs,
    ...columns.map((map) =>
      xs.map((x) => {
        const value = map.get(x);
        return typeof value === "number" ? value : null;
      }),
    ),
  ];
}

function save(name: string, address: string): void {
  const link = document.createElement("a");
  link.href = address;
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
}

function saveCsv(title: string, x: string, lines: Line[]): void {
  const quote = (text: string) => `"${text.replace(/"/g, '""')}"`;
  const rows = lines.flatMap((line) =>
    line.xs.map((at, index) =>
      [quote(line.label), at, line.ys[index], line.low?.[index], line.high?.[index]].join(","),
    ),
  );
  const text = [`line,${quote(x)},${quote(title)},low,high`, ...rows].join("\n");
  save(`${title}.csv`, `data:text/csv;charset=utf-8,${encodeURIComponent(text)}`);
}

/** Save the chart as it is on the screen, with its title and its legend above. */
function savePicture(title: string, chart: uPlot, lines: Line[]): void {
  const { canvas } = chart.ctx;
  const scale = devicePixelRatio;
  const [picture, top] = [document.createElement("canvas"), 44 * scale];
  picture.width = canvas.width;
  picture.height = canvas.height + top;
  const context = picture.getContext("2d")!;
  const style = getComputedStyle(document.documentElement);
  context.fillStyle = style.getPropertyValue("--card").trim();
  context.fillRect(0, 0, picture.width, picture.height);
  context.fillStyle = style.getPropertyValue("--ink").trim();
  context.font = `600 ${14 * scale}px system-ui, sans-serif`;
  context.fillText(title, 8 * scale, 18 * scale);
  context.font = `${12 * scale}px system-ui, sans-serif`;
  let left = 8 * scale;
  for (const line of lines) {
    context.fillStyle = style.getPropertyValue(`--line-${line.index % NUM_COLOURS}`).trim();
    context.fillText(line.label, left, 36 * scale);
    left += context.measureText(line.label).width + 16 * scale;
  }
  context.drawImage(canvas, 0, top);
  save(`${title}.png`, picture.toDataURL("image/png"));
}
