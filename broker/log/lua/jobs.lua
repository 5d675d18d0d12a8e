-- Jobs: a lock for a job that must not run twice at a time. Keys: the lock, a string that expires.

local store = require('store/prelude')

-- hold_job: take, keep or release the lock of a job.
-- KEYS its key, shard base.  ARGV 'take' | 'keep' | 'give', token, time to live in ms.  returns {'held'} {'other'} {'given'}
--   A lock without expiry, or with a longer one than `ms`, was not taken here and is replaced.
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
