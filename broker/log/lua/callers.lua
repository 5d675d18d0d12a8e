-- Callers: those who wait for the end of a conversation, until they have their answer.
-- Keys:  conversation base  :caller       hash    kind, name, request_id, kept, headless, broker; outcome, started, looks,
--                                                 answered
--                           :caller:lock  string  the worker session that delivers the answer
--        shard base         :awaited      zset    conversation -> when to check it without a notice (ms)
--                           :notices      stream  c: conversation, e: '1' if it may have ended, '0' for other progress

local store = require('store/prelude')
local callers = {}

local PROGRESS, END = '1', '2'  -- meta.noticed: what the latest notice was about, until it is read

-- Store a caller. The first one of a conversation stays.
function callers.add(base, shard, fields)
  local key = base .. ':caller'
  if store.is_there(shard, key, 'hash') and redis.call('HEXISTS', key, 'kind') == 1 then return end
  redis.call('HSET', key, unpack(fields))
end

-- Notify ingress workers, at most once of progress and once of an end until they read it.
function callers.send_notice(shard, meta, cid, noticed, ends)
  if noticed and (noticed == END or not ends) then return end
  redis.call('XADD', shard .. ':notices', '*', 'c', cid, 'e', ends and '1' or '0')
  redis.call('HSET', meta, 'noticed', ends and END or PROGRESS)
end

-- forget_caller: delete the caller of a conversation, unless the conversation exists.
-- KEYS  conversation base, shard base   ARGV  cid
-- returns  {'forgotten'} {'begun'}
local function forget_caller(keys, args)
  if store.get(keys[1] .. ':meta', 'last_id') then return {'begun'} end
  redis.call('DEL', keys[1] .. ':caller')
  redis.call('ZREM', keys[2] .. ':awaited', args[1])
  return {'forgotten'}
end

-- take_answer: decide the answer to a caller unless it is decided, note when the agent started, and acquire the right to
-- deliver the answer for a limited time.
-- KEYS  conversation base, shard base
-- ARGV  cid, answer, holder of the right, for how long (ms), when to check again (ms), number of checks,
--       when the agent started (ms; 0: it never did)
-- returns  {'taken', answer, 1 if the start is new} {'answered'} {'held'} {'missing'}
local function take_answer(keys, args)
  local caller, lock = keys[1] .. ':caller', keys[1] .. ':caller:lock'
  local kind, answered = unpack(redis.call('HMGET', caller, 'kind', 'answered'))
  if not kind then return {'missing'} end
  if answered then return {'answered'} end
  redis.call('HSETNX', caller, 'outcome', args[2])
  redis.call('HSET', caller, 'looks', args[6])
  redis.call('ZADD', keys[2] .. ':awaited', args[5], args[1])
  redis.call('SET', lock, args[3], 'NX', 'PX', args[4])
  if redis.call('GET', lock) ~= args[3] then return {'held'} end
  return {'taken', store.get(caller, 'outcome'), redis.call('HSETNX', caller, 'started', args[7])}
end

-- mark_answered: the caller has its answer, and the conversation may continue without it. Idempotent.
-- KEYS  conversation base, shard base   ARGV  cid, how long to keep the caller of a conversation that was never created (ms)
-- returns  {'answered', 1 if the message of the task arrived again meanwhile}
local function mark_answered(keys, args)
  local caller, meta = keys[1] .. ':caller', keys[1] .. ':meta'
  local again = redis.call('HEXISTS', caller, 'again')
  if redis.call('HEXISTS', caller, 'kind') == 0 then
    redis.call('DEL', caller)  -- only `again` of a conversation that is deleted: nothing else would remove it
  else
    redis.call('HSET', caller, 'answered', '1')
    if redis.call('EXISTS', meta) == 0 then redis.call('PEXPIRE', caller, args[2]) end
  end
  redis.call('HDEL', meta, 'awaited', 'noticed')
  redis.call('ZREM', keys[2] .. ':awaited', args[1])
  redis.call('DEL', caller .. ':lock')
  return {'answered', again}
end

redis.register_function('deck_forget_caller', forget_caller)
redis.register_function('deck_take_answer', take_answer)
redis.register_function('deck_mark_answered', mark_answered)

return callers
