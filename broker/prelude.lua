-- What every function library begins with; put behind its first line when it is deployed, see store.py.

local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

local function get(key, field)
  local value = redis.call('HGET', key, field)
  if value == false then return nil end
  return value
end

-- A deadline of 0 says that the worker is being buried, which is final: it must not come back half robbed.
local function alive(shard, worker)
  local deadline = redis.call('ZSCORE', shard .. ':workers', worker)
  return deadline ~= false and tonumber(deadline) > 0
end

local function pairs_of(flat)
  local found = {}
  for i = 1, #flat, 2 do found[flat[i]] = flat[i + 1] end
  return found
end
