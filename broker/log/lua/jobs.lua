-- Jobs: a job that is done alone has one place. Keys: the place, a string that expires.

local store = require('store/prelude')

-- hold_job: take, keep or give back the place of a job that is done alone.
-- KEYS its key, shard base.  ARGV 'take' | 'keep' | 'give', token, for how many ms.  returns {'held'} {'other'} {'given'}
--   A place that nobody would ever leave, or not for long, was not taken here, and keeps no job from being done.
local function hold_job(keys, args)
  local key, what, token, ms = keys[1], args[1], args[2], tonumber(args[3])
  local holder = store.is_there(keys[2], key, 'string') and redis.call('GET', key)
  if what ~= 'take' and holder ~= token then return {'other'} end
  if what == 'give' then
    redis.call('DEL', key)
    return {'given'}
  end
  local left = holder and redis.call('PTTL', key) or 0
  if holder and holder ~= token and left >= 0 and left <= ms then return {'other'} end
  redis.call('SET', key, token, 'PX', ms)
  return {'held'}
end

redis.register_function('deck_hold_job', hold_job)
