-- Helpers shared by all modules of the function library; see function_libraries.py.

local store = {}

-- The server's own clock, which may jump. It is only displayed; no wait and no deadline depends on it.
function store.wall_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- A longer time between two heartbeats is treated as a jump of the server's clock.
store.BEAT_GAP_MS = 5000

-- Parse a field as a number; nil for any other text, infinities and numbers that a double cannot hold exactly.
function store.number_of(text)
  local number = text and tonumber(text)
  if number and math.abs(number) <= 2 ^ 52 then return number end
  return nil
end

-- Returns the shard's time and the server's clock. The shard's time advances like the workers' clocks, whatever the
-- server's clock does. Heartbeats maintain it (see keep_time). Between two heartbeats it follows the server's clock,
-- but never backwards or far ahead.
--   :clock  hash  wall -> the server's clock at the latest heartbeat, now -> the shard's time then,
--           hooked -> whether webhooks follow any of its conversations; every append needs it
function store.times_ms(shard)
  local wall, kept = store.wall_ms(), redis.pcall('HMGET', shard .. ':clock', 'wall', 'now', 'hooked')
  local beat, time = store.number_of(kept[1]), store.number_of(kept[2])
  if not (beat and time) then return wall, wall, kept[3] end
  return math.floor(time + math.max(0, math.min(wall - beat, store.BEAT_GAP_MS))), wall, kept[3]
end

function store.now_ms(shard)
  return (store.times_ms(shard))
end

function store.get(key, field)
  local value = redis.call('HGET', key, field)
  if value == false then return nil end
  return value
end

-- Returns a reply with the demand of its conversation as the last element, 'acks:disk' or 'acks:replica', if it has one
-- (the field `acks` of its meta). The caller's connection confirms the write before the reply counts, see confirmation.py.
function store.with_acks(reply, acks)
  if acks == 'disk' or acks == 'replica' then reply[#reply + 1] = 'acks:' .. acks end
  return reply
end

-- Whether the caller may run a command. Unlike an attempt, this leaves nothing in the server's log of refused commands.
function store.may(...)
  return not redis.acl_check_cmd or redis.acl_check_cmd(...)
end

-- A deadline of 0 means that the worker is being removed. This is final: it must not return without some of its work.
function store.alive(shard, worker)
  local deadline = redis.call('ZSCORE', shard .. ':workers', worker)
  return deadline ~= false and tonumber(deadline) > 0
end

function store.pairs_of(flat)
  local found = {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

-- Record in `:unreadable` that a value of a key cannot be used; `deckhands doctor` shows it.
function store.note_unreadable(shard, key, id, why, held)
  redis.pcall('XADD', shard .. ':unreadable', 'MAXLEN', '~', 1000, '*', 'key', key, 'id', id,
    'why', string.sub(why, 1, 200), 'held', string.sub(held or '', 1, 1000))
end

-- Run `work` for one of many items and return its result. An error caused by the item's keys is recorded and nil is
-- returned, so that it does not affect other items. An error of the store itself is raised.
function store.attempt(shard, key, id, work, ...)
  local done, outcome = pcall(work, ...)
  if done then return outcome end
  local why = type(outcome) == 'table' and outcome.err or tostring(outcome)
  for _, ours in ipairs({'OOM', 'READONLY', 'MISCONF', 'NOPERM', 'NOREPLICAS', 'CLUSTERDOWN', 'CROSSSLOT'}) do
    if string.find(why, ours, 1, true) == 1 then error(outcome) end
  end
  store.note_unreadable(shard, key, id, why)
  return nil
end

-- Return whether a key exists with the expected type. A key of another type is moved to '<key>:unreadable', or without a
-- hash tag to '{<key>}:unreadable', which has the same slot. Without a shard, the reason is returned and not recorded.
function store.is_there(shard, key, kind)
  local found = redis.call('TYPE', key)['ok']
  if found == kind then return true end
  if found == 'none' then return false end
  local aside = (string.find(key, '{', 1, true) and key or '{' .. key .. '}') .. ':unreadable'
  redis.call('RENAME', key, aside)
  local why = 'it was a ' .. found .. ', not a ' .. kind .. '; it is kept as ' .. aside
  if shard then store.note_unreadable(shard, key, '', why) end
  return false, why
end

return store
