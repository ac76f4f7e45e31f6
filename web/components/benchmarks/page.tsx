"use client";

import { Client } from "@/components/client";
import { Benchmarks } from "./view";

export const Page = () => <Client>{() => <Benchmarks />}</Client>;
