/** Numbers as people read them. Pure; the language's own digits and separators. */

const NONE = '–';

/** A rate with about three digits: 0, 8.4, 84, 1,240. */
export function rate(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return NONE;
  }
  if (value === 0) {
    return '0';
  }
  return value < 9.95 ? value.toFixed(1) : Math.round(value).toLocaleString();
}

export function ratio(value: number | null | undefined): string {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : value.toFixed(2);
}

export function percent(value: number | null | undefined): string {
  return value === null || value === undefined || !Number.isFinite(value) ? NONE : `${Math.round(value * 100)}%`;
}

export function count(value: number): string {
  return Math.round(value).toLocaleString();
}

/** Binary units, as the engine's own reports have them. */
export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) {
    return NONE;
  }
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 99.95 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** 42 s, 3 min, 2 h 05 min. */
export function duration(seconds: number): string {
  if (seconds < 90) {
    return `${Math.max(0, Math.round(seconds))} s`;
  }
  const minutes = Math.round(seconds / 60);
  if (minutes < 90) {
    return `${minutes} min`;
  }
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`;
}

/** The first letters of a digest, enough to tell two apart by eye. */
export function short(digest: string): string {
  return digest.length > 16 ? `${digest.slice(0, 12)}…` : digest;
}

/** A client as people know it: its notebook. The engine host adds the process. */
export function clientName(client: string): string {
  return baseName(client.replace(/ \(pid \d+\)$/, ''));
}

/** The last part of a path, whatever the system it is from. */
export function baseName(path: string): string {
  return path.split(/[\\/]/).pop() || path;
}
