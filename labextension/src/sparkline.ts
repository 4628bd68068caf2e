/** Geometry of sparklines. Pure. */
import type { IPoint } from './history.js';

export interface ILine {
  /** SVG path data of the line and of the area under it. */
  line: string;
  area: string;
  /** Value at the top edge. */
  top: number;
}

/** A line over the last `seconds` up to `now`, broken where samples are missing for more than `gap` seconds. */
export function line(points: IPoint[], now: number, seconds: number, width: number, height: number, gap = 5): ILine {
  const top = ceiling(points.reduce((most, point) => Math.max(most, point.value), 0));
  const x = (at: number) => round(width * (1 - (now - at) / seconds));
  const y = (value: number) => round(height - (height - 1) * (value / top));
  let [path, area, start] = ['', '', ''];
  points.forEach((point, index) => {
    const before = points[index - 1];
    const broken = !before || point.at - before.at > gap;
    const place = `${x(point.at)} ${y(point.value)}`;
    if (broken) {
      area += before ? `L${x(before.at)} ${height}Z` : '';
      start = `M${x(point.at)} ${height}L${place}`;
      path += `M${place}`;
      area += start;
    } else {
      path += `L${place}`;
      area += `L${place}`;
    }
  });
  const last = points[points.length - 1];
  return { line: path, area: last ? `${area}L${x(last.at)} ${height}Z` : '', top };
}

/** The next of 1, 2, 5, 10, 20, 50 …: the scale stays while values wander. */
export function ceiling(value: number): number {
  if (!(value > 1)) {
    return 1;
  }
  const magnitude = 10 ** Math.floor(Math.log10(value));
  return magnitude * ([1, 2, 5, 10].find(step => step * magnitude >= value) ?? 10);
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
