"use client";

import { useEffect, useState } from "react";
import { KEY } from "@/lib/theme";

const THEMES = ["light dark", "light", "dark"] as const;
const WORDS: Record<string, string> = { "light dark": "as the system", light: "light", dark: "dark" };

export function Theme() {
  const [theme, setTheme] = useState<string>(THEMES[0]);
  useEffect(() => {
    setTheme(document.documentElement.style.colorScheme || THEMES[0]);
  }, []);
  const choose = (value: string) => {
    setTheme(value);
    document.documentElement.style.colorScheme = value;
    localStorage.setItem(KEY, value);
  };
  return (
    <label className="small">
      <span className="hidden-text">Colours</span>
      <select value={theme} onChange={(event) => choose(event.target.value)}>
        {THEMES.map((name) => (
          <option key={name} value={name}>
            {WORDS[name]}
          </option>
        ))}
      </select>
    </label>
  );
}
