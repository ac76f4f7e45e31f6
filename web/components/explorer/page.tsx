"use client";

import { Client } from "@/components/client";
import { Explorer } from "./view";

export const Page = () => <Client>{() => <Explorer />}</Client>;
