-- wrk's script of a load: posts batches of observations to runs in turns, each with new steps; one in 20 is an eval.
-- Arguments: a file with a run's id a line; a key; observations a request; the first step; and after how many answers it
-- ends, 0: never.
local ffi = require("ffi")
ffi.cdef("int getpid(void); int kill(int pid, int signal);")

function init(args)
  key, batch, runs, steps, turn, answers = args[2], tonumber(args[3]), {}, {}, 0, 0
  is_trial = true -- wrk does not send the first request
  for run in io.lines(args[1]) do
    table.insert(runs, run)
    table.insert(steps, tonumber(args[4]))
  end
  if args[5] ~= "0" then
    function response()
      answers = answers + 1
      if answers == tonumber(args[5]) then
        wrk.thread:stop()
        ffi.C.kill(ffi.C.getpid(), 2) -- else wrk waits until its time is over
      end
    end
  end
end

-- A run improves more and more slowly and does not turn.
local function write_observation(step)
  local progress, noise = step / 2000, 0.07 * (math.random() - 0.5)
  local place = step % 20
  local metric = place == 0 and "eval" or place % 3 == 1 and "proxy" or place % 3 == 2 and "kl" or "loss"
  local value = 1 - math.exp(-progress) + noise
  if metric == "loss" then
    value = 0.5 + math.exp(-progress) + noise
  elseif metric == "kl" then
    value = 4 * math.sqrt(progress) + math.abs(noise)
  end
  return ('{"metric":"%s","step":%d,"value":%.5f}'):format(metric, step, value)
end

function request()
  turn = turn % #runs + 1
  local run, first, observations = runs[turn], steps[turn], {}
  for index = 1, batch do
    observations[index] = write_observation(first + index - 1)
  end
  if is_trial then
    is_trial, turn = false, 0
  else
    steps[turn] = first + batch
  end
  local body = '{"observations":[' .. table.concat(observations, ",") .. "]}"
  return "POST /api/v1/runs/" .. run .. "/observations HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer " .. key
    .. "\r\nContent-Type: application/json\r\nContent-Length: " .. #body .. "\r\n\r\n" .. body
end

function done(summary, latency)
  local errors = summary.errors
  io.stderr:write(
    ('{"requests":%d,"refused":%d,"broken":%d,"seconds":%f,"p50_ms":%f,"p99_ms":%f}\n'):format(
      summary.requests,
      errors.status,
      errors.connect + errors.read + errors.write,
      summary.duration / 1e6,
      latency:percentile(50) / 1e3,
      latency:percentile(99) / 1e3
    )
  )
end
