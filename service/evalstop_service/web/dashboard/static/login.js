// Reached by a link on another site, the request had no strict cookie: the visitor may be signed in all the same.

import { fetchSameOrigin } from "./live.js";

const session = await (await fetchSameOrigin("/session")).json();
if (session.signed_in) location.replace(document.querySelector("main").dataset.next);
