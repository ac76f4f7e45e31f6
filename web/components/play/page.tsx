"use client";

import { Client } from "@/components/client";
import { Play } from "./view";

export const Page = () => <Client>{() => <Play />}</Client>;
