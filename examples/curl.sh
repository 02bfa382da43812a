#!/usr/bin/env bash
# A trainer in any language: three requests are all there is to it. EVALSTOP_URL and EVALSTOP_KEY say where the service is.
set -euo pipefail

post() { # PATH BODY
  curl -sS --fail-with-body "$EVALSTOP_URL/api/v1$1" \
    -H "Authorization: Bearer $EVALSTOP_KEY" -H "Content-Type: application/json" -d "$2"
}
value() { # NAME: a string, number or truth value out of the answer on standard input; use jq where you have it
  grep -o "\"$1\": *\"\?[^,\"}]*" | head -1 | sed 's/.*: *"\?//'
}

# 1. Open the run by its name. `eval` is the score that people care about.
run=$(post /runs '{"name": "curl", "metrics": {"score": {"role": "eval"}}, "policy": "paper", "mode": "enforce"}' | value id)

for step in $(seq 10 10 1000); do
  score=$((step <= 50 ? step : 100 - step)) # stands for an evaluation
  # 2. Say that a checkpoint exists, so that it can become the best one.
  post "/runs/$run/checkpoints" "{\"step\": $step, \"uri\": \"file:///checkpoints/$step\"}" >/dev/null
  # 3. Post what was measured. The answer holds the verdict; sent again it counts once.
  answer=$(post "/runs/$run/observations" "{\"observations\": [{\"metric\": \"score\", \"step\": $step, \"value\": $score}]}")
  if [ "$(value should_stop <<<"$answer")" = true ]; then
    obeyed=", \"obeyed\": \"$(value id <<<"$answer")\"" # the decision that this trainer ends for
    break
  fi
done

post "/runs/$run/finish" "{\"status\": \"completed\"${obeyed-}}" >/dev/null
echo "ended at step $step of 1000"
