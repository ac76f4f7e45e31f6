// Calls of the server's API, typed by its OpenAPI description (lib/schema.d.ts is generated).

import type { components, paths } from "./schema";

export type Schemas = components["schemas"];

type Answer<O> = O extends {
  responses: { 200: { content: { "application/json": infer A } } };
}
  ? A
  : never;

export type GetPath = {
  [P in keyof paths]: Answer<paths[P]["get"]> extends never ? never : P;
}[keyof paths];

export type Got<P extends GetPath> = Answer<paths[P]["get"]>;

type Value = string | number | boolean | null | undefined;
export type Values = Record<string, Value | string[]>;

/** The address of a route: `{name}` in it is replaced, the other values become its query. */
export function address(route: string, values: Values = {}): string {
  const query = new URLSearchParams();
  let path = route;
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") continue;
    if (path.includes(`{${name}}`)) {
      path = path.replace(`{${name}}`, encodeURIComponent(String(value)));
    } else if (Array.isArray(value)) {
      for (const one of value) query.append(name, one);
    } else {
      query.set(name, String(value));
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** A refusal of the server, in its own words. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function parsed(answer: Response): Promise<unknown> {
  const text = await answer.text();
  let content: unknown;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Refused(answer.status, `the server answered ${answer.status} without JSON`);
  }
  if (answer.ok) return content;
  const detail = (content as { detail?: unknown }).detail;
  const words = Array.isArray(detail)
    ? detail.map((x: { loc?: unknown[]; msg?: string }) => `${x.loc?.at(-1)}: ${x.msg}`).join("; ")
    : String(detail);
  throw new Refused(answer.status, words);
}

export async function get<P extends GetPath>(route: P, values: Values = {}): Promise<Got<P>> {
  return (await parsed(await fetch(address(route, values)))) as Got<P>;
}

export async function readText(text: string, block: number | null): Promise<Schemas["TextFigures"]> {
  const answer = await fetch("/api/play/texts", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ text, block }),
  });
  return (await parsed(answer)) as Schemas["TextFigures"];
}
