-- What every function library begins with; put behind its first line when it is deployed, see store.py.

local store = {}

-- The server's own clock, which may jump. It is only shown; no wait and no deadline rests on it.
function store.wall_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

-- The longest time between two beats that is taken for time and not for a jump of the server's clock.
store.BEAT_GAP_MS = 5000

-- The number that a field holds; nil for anything else, infinities and what no double holds exactly among it.
function store.number_of(text)
  local number = text and tonumber(text)
  if number and math.abs(number) <= 2 ^ 52 then return number end
  return nil
end

-- The shard's time, which passes as it does for the workers, whatever the server's clock does, and the server's clock.
-- Between two beats, which keep it (see keep_time), it follows the server's clock, but neither back nor far ahead.
--   :clock  hash  wall -> the server's clock at the latest beat, now -> the shard's time then,
--           hooked -> whether webhooks hear of any of its conversations, which every append has to know
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

-- A deadline of 0 says that the worker is being removed, which is final: it must not come back half robbed.
function store.alive(shard, worker)
  local deadline = redis.call('ZSCORE', shard .. ':workers', worker)
  return deadline ~= false and tonumber(deadline) > 0
end

function store.pairs_of(flat)
  local found = {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end

-- Note in `:unreadable` that something which a key holds cannot be used; `deckhands doctor` shows it.
function store.note_unreadable(shard, key, id, why, held)
  redis.pcall('XADD', shard .. ':unreadable', 'MAXLEN', '~', 1000, '*', 'key', key, 'id', id,
    'why', string.sub(why, 1, 200), 'held', string.sub(held or '', 1, 1000))
end

-- Do something for one of many: what is wrong with its keys is noted and hurts nobody else. Returns nil then, and what
-- the work returns otherwise. An error of the store itself is nobody's and is passed on.
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

-- Move a key of another type than it should have out of the way, to '<key>:unreadable'. Returns whether it is there.
function store.is_there(shard, key, kind)
  local found = redis.call('TYPE', key)['ok']
  if found == kind then return true end
  if found ~= 'none' then
    redis.call('RENAME', key, key .. ':unreadable')
    local why = 'it was a ' .. found .. ', not a ' .. kind .. '; it is kept as ' .. key .. ':unreadable'
    store.note_unreadable(shard, key, '', why)
  end
  return false
end

return store
