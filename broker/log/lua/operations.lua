-- The record of operations: a list of JSON objects, each with `at`, its time in ms, in the order of their times.

local store = require('store/prelude')

local READ_AT_ONCE, MOST = 100, 10000

-- The time of an entry; nil if it cannot be read.
local function time_of(text)
  local is_json, entry = pcall(cjson.decode, text)
  return is_json and type(entry) == 'table' and type(entry.at) == 'number' and entry.at or nil
end

-- trim_operations: remove the entries before a time from the start of the record, up to the first that is younger.
-- Entries that cannot be read go with the older ones behind them. Not more than MOST in one call.
-- KEYS the record, shard base.  ARGV a time in ms.  returns {'trimmed', how many}
local function trim_operations(keys, args)
  local record, before, old, at = keys[1], tonumber(args[1]), 0, 0
  if not store.is_there(keys[2], record, 'list') then return {'trimmed', 0} end
  while at < MOST do
    local texts = redis.call('LRANGE', record, at, at + READ_AT_ONCE - 1)
    for _, text in ipairs(texts) do
      local time = time_of(text)
      at = at + 1
      if time and time >= before then
        redis.call('LTRIM', record, old, -1)
        return {'trimmed', old}
      end
      if time then old = at end
    end
    if #texts < READ_AT_ONCE then break end
  end
  -- Entries behind the last readable one may be younger: they stay, unless there are as many as one call removes.
  if at >= MOST and old == 0 then old = at end
  redis.call('LTRIM', record, old, -1)
  return {'trimmed', old}
end

redis.register_function('deck_trim_operations', trim_operations)
