// A request from another site's link lacks the strict cookie, so the visitor may already be signed in.

import { fetchSameOrigin } from "./live.js";

const session = await (await fetchSameOrigin(new URL("../../session", import.meta.url))).json();
if (session.signed_in) location.replace(document.querySelector("main").dataset.next);
