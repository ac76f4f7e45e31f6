"use client";

import { useEffect, useRef } from "react";
import { Select } from "@/components/fields";

const SPEEDS = [60, 30, 10, 5];

interface Props {
  at: number;
  last: number;
  isPlaying: boolean;
  speed: number;
  isFollowing: boolean;
  canFollow: boolean;
  onMove: (step: number | null) => void;
  onPlay: (isPlaying: boolean) => void;
  onSpeed: (seconds: number) => void;
}

/** Play, pause, scrub, speed. `onMove(null)` means the newest step. */
export function Player({ at, last, isPlaying, speed, isFollowing, canFollow, onMove, onPlay, onSpeed }: Props) {
  const position = useRef(at);
  position.current = at;
  const move = useRef(onMove);
  move.current = onMove;
  const stop = useRef(onPlay);
  stop.current = onPlay;

  useEffect(() => {
    if (!isPlaying) return;
    let frame = 0;
    let before = performance.now();
    let step = position.current >= last ? 0 : position.current; // at the end, from the beginning
    position.current = step;
    const tick = (now: number) => {
      // A drag while it plays goes on from there.
      if (Math.abs(position.current - Math.round(step)) > last / 20) step = position.current;
      step += (last / (1000 * speed)) * (now - before);
      before = now;
      if (step >= last) {
        move.current(null);
        stop.current(false);
        return;
      }
      position.current = Math.round(step);
      move.current(Math.round(step));
      frame = requestAnimationFrame(tick);
    };
    frame = requestAnimationFrame(tick);
    return () => cancelAnimationFrame(frame);
  }, [isPlaying, last, speed]);

  return (
    <div className="row centre" role="group" aria-label="Replay">
      <button type="button" className="main" onClick={() => onPlay(!isPlaying)} disabled={!last}>
        <span aria-hidden="true">{isPlaying ? "❚❚" : "▶"}</span> {isPlaying ? "Pause" : "Play"}
      </button>
      <label className="field" style={{ flex: "1 1 12rem" }}>
        <span>
          Step <b>{at.toLocaleString("en")}</b> of {last.toLocaleString("en")}
        </span>
        <input
          type="range"
          min={0}
          max={last || 1}
          value={at}
          step={1}
          onChange={(event) => {
            const value = Number(event.target.value);
            onMove(value >= last ? null : value);
          }}
        />
      </label>
      <Select
        label="Speed"
        value={String(speed)}
        options={SPEEDS.map((x) => ({ value: String(x), label: `whole run in ${x} s` }))}
        onChange={(value) => onSpeed(Number(value))}
      />
      {canFollow ? (
        <button type="button" onClick={() => onMove(null)} disabled={isFollowing}>
          {isFollowing ? "Following" : "Follow the newest step"}
        </button>
      ) : null}
    </div>
  );
}
