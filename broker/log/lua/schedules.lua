-- Schedules: conversations that start by the calendar.
-- Keys:  shard base  :schedules  hash   :schedules:due  zset  name -> next tick (ms)   :schedules:standing  hash

local store = require('store/prelude')

-- move_schedule: record the progress of a schedule, unless another process has. A schedule paused meanwhile stays paused.
-- KEYS shard base.  ARGV name, the tick that was handled (ms) or '', the next one or '', the expected status, the new one
-- returns {'moved'} {'gone'} {'other'}
local function move_schedule(keys, args)
  local root, name = keys[1] .. ':schedules', args[1]
  if redis.call('HEXISTS', root, name) == 0 then return {'gone'} end
  local known, due = store.get(root .. ':standing', name), redis.call('ZSCORE', root .. ':due', name)
  if known and known ~= args[4] then return {'other'} end
  redis.call('HSET', root .. ':standing', name, args[5])
  if due and args[2] ~= '' and tonumber(due) == tonumber(args[2]) then
    if args[3] == '' then redis.call('ZREM', root .. ':due', name)
    else redis.call('ZADD', root .. ':due', args[3], name) end
  end
  return {'moved'}
end

-- put_schedule: create, change or remove a schedule, together with its next tick.
-- KEYS shard base.  ARGV name, its expected text or '', its new text or '' to remove it, its next tick (ms) or '', maximum
--      number of schedules
-- returns {'put'} {'other'}: it has another text  {'full'}
local function put_schedule(keys, args)
  local root, name, known, text, due = keys[1] .. ':schedules', args[1], args[2], args[3], args[4]
  local there = store.get(root, name) or ''
  if there ~= known and there ~= text then return {'other'} end  -- not if it is repeated after a lost reply
  if text == '' then
    redis.call('HDEL', root, name)
    redis.call('HDEL', root .. ':standing', name)
  else
    if there == '' and redis.call('HLEN', root) >= tonumber(args[5]) then return {'full'} end
    redis.call('HSET', root, name, text)
  end
  if due == '' then redis.call('ZREM', root .. ':due', name)
  else redis.call('ZADD', root .. ':due', 'NX', due, name) end
  return {'put'}
end

redis.register_function('deck_move_schedule', move_schedule)
redis.register_function('deck_put_schedule', put_schedule)
