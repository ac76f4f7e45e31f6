"use client";

import { Client } from "@/components/client";
import { Training } from "./view";

export const Page = () => <Client>{() => <Training />}</Client>;
