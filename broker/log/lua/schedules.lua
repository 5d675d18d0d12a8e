-- Schedules: conversations that begin by the calendar.
-- Keys:  shard base  :schedules  hash   :schedules:due  zset  name -> next tick (ms)   :schedules:standing  hash

local store = require('store/prelude')

-- move_schedule: write how far a schedule has come, unless somebody else has; one that was paused meanwhile stays so.
-- KEYS shard base.  ARGV name, the tick that was looked at (ms) or '', the next one or '', what was known, what is now
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

-- put_schedule: write a schedule down, change or remove it, together with its next tick.
-- KEYS shard base.  ARGV name, what was known of it or '', what it is now or '' to remove it, its next tick (ms) or '',
--      how many there may be
-- returns {'put'} {'other'}: it is not what was known  {'full'}
local function put_schedule(keys, args)
  local root, name, known, text, due = keys[1] .. ':schedules', args[1], args[2], args[3], args[4]
  local there = store.get(root, name) or ''
  if there ~= known and there ~= text then return {'other'} end  -- the same again: a reply was lost
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
