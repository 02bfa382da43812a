-- wrk's script of a flood: sends one request with another number each time, and counts the answers by their status.
-- Its argument is a file: the method, the path, the media type, how many senders follow, their
-- headers with the tokens of their forms, and the body.
local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(args)
  local file = assert(io.open(args[1]))
  method, path, senders, statuses, number = file:read("*l"), file:read("*l"), {}, {}, os.time() % 100000 * 1000 -- not used by an earlier flood
  local kind = file:read("*l")
  for index = 1, tonumber(file:read("*l")) do
    local name, value, token = file:read("*l"):match("^(.-): (.*)\t(.*)$")
    senders[index] = { headers = { [name] = value, ["Content-Type"] = kind }, token = token }
  end
  body = file:read("*a")
  file:close()
end

local function write_evals(count)
  local evals = {}
  for index = 1, count do
    evals[index] = ('{"metric":"eval","step":%d,"value":0.5}'):format(number * count + index)
  end
  return table.concat(evals, ",")
end

function request()
  number = number + 1
  local sender = senders[number % #senders + 1]
  local filled = body:gsub("@count@", number):gsub("@(%d+) evals@", write_evals):gsub("@csrf@", sender.token)
  return wrk.format(method, (path:gsub("@count@", number)), sender.headers, filled)
end

function response(status)
  statuses[tostring(status)] = (statuses[tostring(status)] or 0) + 1
end

function done()
  local counts = {}
  for status, count in pairs(threads[1]:get("statuses")) do
    table.insert(counts, ('"%s":%d'):format(status, count))
  end
  io.stderr:write("{", table.concat(counts, ","), "}\n")
end
