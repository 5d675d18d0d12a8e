-- Model calls on their way through a provider's batch API: who waits, what was sent together, what came back.
--
-- Every function takes KEYS shard base ('deck:{0}') and derives the real keys from it:
--   :batch:lanes                   hash  lane -> what a worker needs to serve it
--   :batch:queue:<lane>            sorted set of conversations, by the time they came
--   :batch:call:<conversation>     hash  step, seen, lane, batch, body, bytes, result
--   :batch:open                    sorted set of batches that are not over, by the time of the next look
--   :batch:about:<batch>           hash  lane, state, worker, until, …; further fields are the workers'
--   :batch:calls:<batch>           hash  number -> '<conversation> <step>'
--   :batch:known                   sorted set of the providers' ids of batches, by the time they became known
--   :workers
-- A conversation has one call at most; `step` says which: '<iteration>.<attempt>'. Times are milliseconds.
--
-- A batch is recorded, with the calls that are in it, before it is sent: a worker that finds one that was sent by a worker
-- that is dead looks for it at the provider before it sends it again. One live worker at most has the lease of a batch.
-- A lane is there while calls wait in it; a batch has what is needed to serve it. What the store has lost of a batch or of
-- a queue ends it: the calls are forgotten, and put again by their conversations.

local store = require('store/prelude')

local LANES, OPEN, KNOWN = ':batch:lanes', ':batch:open', ':batch:known'
local KNOWN_MS = 7 * 86400000

local function call_key(shard, cid) return shard .. ':batch:call:' .. cid end

local function queue_key(shard, lane) return shard .. ':batch:queue:' .. lane end

local function about_key(shard, batch) return shard .. ':batch:about:' .. batch end

local function calls_key(shard, batch) return shard .. ':batch:calls:' .. batch end

-- Whether a worker may work on a batch: no other does, or the one that did is dead or has taken too long.
local function is_free(shard, batch, worker, now)
  local about = about_key(shard, batch)
  local holder = store.get(about, 'worker')
  if not holder or holder == '' or holder == worker or not store.alive(shard, holder) then return true end
  return now >= (tonumber(store.get(about, 'until')) or 0)
end

-- Whether a key is a hash of ours or not there at all; what else it was is moved out of the way.
local function read_hash(shard, key)
  store.is_there(shard, key, 'hash')
  return key
end

local function holds(shard, batch, worker)
  return store.get(about_key(shard, batch), 'worker') == worker
end

local function forget(shard, cid)
  local call = read_hash(shard, call_key(shard, cid))
  local lane = store.get(call, 'lane')
  if lane and store.is_there(shard, queue_key(shard, lane), 'zset') then redis.call('ZREM', queue_key(shard, lane), cid) end
  redis.call('DEL', call)
end

-- Whether a call that has no result is in a batch that is not over, or in the queue of a lane that somebody serves.
local function is_under_way(shard, cid, batch, lane)
  if batch then return store.is_there(shard, shard .. OPEN, 'zset') and redis.call('ZSCORE', shard .. OPEN, batch) end
  local queue = queue_key(shard, lane or '')
  return store.is_there(shard, queue, 'zset') and redis.call('ZSCORE', queue, cid)
    and store.is_there(shard, shard .. LANES, 'hash') and store.get(shard .. LANES, lane)
end

-- deck_batch_ask: how a conversation's call stands.  ARGV cid, step
-- returns {'none'} {'waiting', seen} {'sent', seen, batch} {'done', seen, result}
local function ask(keys, args)
  local shard, cid = keys[1], args[1]
  local call = read_hash(shard, call_key(shard, cid))
  if store.get(call, 'step') ~= args[2] then return {'none'} end
  local seen, result, batch = store.get(call, 'seen'), store.get(call, 'result'), store.get(call, 'batch')
  if result then return {'done', seen, result} end
  if not is_under_way(shard, cid, batch, store.get(call, 'lane')) then
    forget(shard, cid)
    return {'none'}
  end
  if batch then return {'sent', seen, batch} end
  return {'waiting', seen}
end

-- deck_batch_put: let a call wait for a batch; a call of an earlier step is forgotten.
-- ARGV cid, step, seen, lane, about the lane, body, bytes.  returns {'put'}
local function put(keys, args)
  local shard, cid = keys[1], args[1]
  local call = read_hash(shard, call_key(shard, cid))
  if store.get(call, 'step') == args[2] then return {'put'} end
  forget(shard, cid)
  redis.call('HSET', read_hash(shard, shard .. LANES), args[4], args[5])
  store.is_there(shard, queue_key(shard, args[4]), 'zset')
  redis.call('HSET', call, 'step', args[2], 'seen', args[3], 'lane', args[4], 'body', args[6], 'bytes', args[7])
  redis.call('ZADD', queue_key(shard, args[4]), store.now_ms(shard), cid)
  return {'put'}
end

-- deck_batch_drop: a conversation no longer wants its call, or has its result.  ARGV cid, step or '' for any
-- returns {'none'} {'waiting'} {'sent'} {'done'}
local function drop(keys, args)
  local shard, cid = keys[1], args[1]
  local call = read_hash(shard, call_key(shard, cid))
  local step = store.get(call, 'step')
  if not step or (args[2] ~= '' and args[2] ~= step) then return {'none'} end
  local stood = store.get(call, 'result') and 'done' or (store.get(call, 'batch') and 'sent' or 'waiting')
  forget(shard, cid)
  return {stood}
end

-- How large a call is that waits; nil when it is none.
local function size_of(shard, cid)
  local call = call_key(shard, cid)
  return store.get(call, 'step') and tonumber(store.get(call, 'bytes'))
end

-- deck_batch_seal: make a batch of those that wait, if there are enough of them or the first has waited long enough.
-- ARGV lane, batch, worker, lease ms, most calls, most bytes, longest wait in ms
-- returns {'sealed', how many} {'early', in how many ms}; an empty queue is {'early', -1}, and ends the lane
local function seal(keys, args)
  local shard, lane, batch, worker, now = keys[1], args[1], args[2], args[3], store.now_ms(keys[1])
  local queue, most, most_bytes = queue_key(shard, lane), tonumber(args[5]), tonumber(args[6])
  local waiting = store.is_there(shard, queue, 'zset') and redis.call('ZRANGE', queue, 0, most - 1) or {}
  if #waiting == 0 then
    redis.call('HDEL', shard .. LANES, lane)  -- what it is served with stays in its batches
    return {'early', -1}
  end
  local chosen, bytes, is_full = {}, 0, #waiting == most
  for _, cid in ipairs(waiting) do
    local size = store.attempt(shard, call_key(shard, cid), cid, size_of, shard, cid)
    if not size then
      redis.call('ZREM', queue, cid)
    elseif bytes + size > most_bytes and #chosen > 0 then
      is_full = true
      break
    else
      bytes = bytes + size
      chosen[#chosen + 1] = cid
    end
  end
  if #chosen == 0 then return {'early', 0} end
  local left = tonumber(redis.call('ZSCORE', queue, chosen[1])) + tonumber(args[7]) - now
  if not is_full and left > 0 then return {'early', left} end
  for number, cid in ipairs(chosen) do
    local call = call_key(shard, cid)
    redis.call('ZREM', queue, cid)
    redis.call('HSET', call, 'batch', batch)
    redis.call('HSET', calls_key(shard, batch), number, cid .. ' ' .. store.get(call, 'step'))
  end
  redis.call('HSET', about_key(shard, batch), 'lane', lane, 'about_lane', store.get(shard .. LANES, lane) or '',
    'state', 'sealed', 'count', #chosen, 'worker', worker, 'until', now + tonumber(args[4]))
  store.is_there(shard, shard .. OPEN, 'zset')
  redis.call('ZADD', shard .. OPEN, now, batch)
  return {'sealed', #chosen}
end

-- deck_batch_due: which batches somebody should look after now; what stands in the place of what is needed for that is
-- moved away.  ARGV how many at most.  returns {'due', batch …}
local function due(keys, args)
  local shard, open, now = keys[1], keys[1] .. OPEN, store.now_ms(keys[1])
  read_hash(shard, shard .. LANES)
  store.is_there(shard, shard .. KNOWN, 'zset')
  if not store.is_there(shard, open, 'zset') then return {'due'} end
  return {'due', unpack(redis.call('ZRANGEBYSCORE', open, '-inf', now, 'LIMIT', 0, args[1]))}
end

-- What is known of a batch, if that is enough to look after it; nil otherwise.
local function usable(about)
  local found = store.pairs_of(redis.call('HGETALL', about))
  local is_sent = not found['sent_ms'] or store.number_of(found['sent_ms'])
  return found['lane'] and store.number_of(found['count']) and is_sent and found
end

-- Forget a batch, and its calls that have no result. Returns {'lost', those whose calls they are …}.
local function give_up(shard, batch)
  local calls, answer = read_hash(shard, calls_key(shard, batch)), {'lost'}
  local flat = redis.call('HGETALL', calls)
  for n = 2, #flat, 2 do
    local cid = string.match(flat[n], '^(%S+) ') or ''
    local call = read_hash(shard, call_key(shard, cid))
    if store.get(call, 'batch') == batch and not store.get(call, 'result') then
      forget(shard, cid)
      answer[#answer + 1] = cid
    end
  end
  redis.call('DEL', about_key(shard, batch), calls)
  redis.call('ZREM', shard .. OPEN, batch)
  return answer
end

-- deck_batch_lease: take a batch in hand.  ARGV batch, worker, lease ms
-- returns {'leased', field, value …} {'busy'} {'lost', cid …}: the store has lost what was known of it, and it is over
--   field 'waited_ms': since it was noted as being sent
local function lease(keys, args)
  local shard, batch, now = keys[1], args[1], store.now_ms(keys[1])
  if not redis.call('ZSCORE', shard .. OPEN, batch) then return {'busy'} end
  local about = read_hash(shard, about_key(shard, batch))
  if not usable(about) then return give_up(shard, batch) end
  if not is_free(shard, batch, args[2], now) then return {'busy'} end
  redis.call('HSET', about, 'worker', args[2], 'until', now + tonumber(args[3]))
  local answer = redis.call('HGETALL', about)
  table.insert(answer, 1, 'leased')
  answer[#answer + 1] = 'waited_ms'
  answer[#answer + 1] = string.format('%.0f', now - (store.number_of(store.get(about, 'sent_at')) or now))
  return answer
end

-- deck_batch_note: the holder of a batch's lease records the batch's state. A time until the next look ends the lease.
-- ARGV batch, worker, ms until the next look or '' to keep the lease, field, value …; an empty value deletes the field.
-- The field `provider` is the provider's id of the batch: the batch has been sent, so the bodies are no longer needed.
-- returns {'noted'} {'lost'}
local function note(keys, args)
  local shard, batch, now = keys[1], args[1], store.now_ms(keys[1])
  if not holds(shard, batch, args[2]) then return {'lost'} end
  local about = about_key(shard, batch)
  for i = 4, #args, 2 do
    if args[i + 1] == '' then
      redis.call('HDEL', about, args[i])
    else
      redis.call('HSET', about, args[i], args[i + 1])
    end
    if args[i] == 'sent_ms' then redis.call('HSET', about, 'sent_at', now) end
    if args[i] == 'provider' and args[i + 1] ~= '' then
      redis.call('ZADD', shard .. KNOWN, now, args[i + 1])
      redis.call('ZREMRANGEBYSCORE', shard .. KNOWN, '-inf', now - KNOWN_MS)
      local flat = redis.call('HGETALL', calls_key(shard, batch))
      for n = 2, #flat, 2 do
        local call = read_hash(shard, call_key(shard, string.match(flat[n], '^(%S+) ') or ''))
        if store.get(call, 'batch') == batch then redis.call('HDEL', call, 'body') end
      end
    end
  end
  if args[3] ~= '' then
    redis.call('HSET', about, 'worker', '')
    redis.call('ZADD', shard .. OPEN, now + tonumber(args[3]), batch)
  end
  return {'noted'}
end

-- deck_batch_deliver: keep the result of a call, the first time it is reported.  ARGV batch, number, result
-- returns {'delivered', cid} {'unwanted'}
local function deliver(keys, args)
  local shard, batch = keys[1], args[1]
  local cid, step = string.match(store.get(calls_key(shard, batch), args[2]) or '', '^(%S+) (%S+)$')
  if not cid then return {'unwanted'} end
  local call = read_hash(shard, call_key(shard, cid))
  if store.get(call, 'batch') ~= batch or store.get(call, 'step') ~= step then return {'unwanted'} end
  redis.call('HSETNX', call, 'result', args[3])
  redis.call('HDEL', call, 'body')
  return {'delivered', cid}
end

-- deck_batch_close: a batch is over.  ARGV batch, worker.  returns {'closed'} {'lost'}
local function close(keys, args)
  local shard, batch = keys[1], args[1]
  if not holds(shard, batch, args[2]) then return {'lost'} end
  redis.call('DEL', about_key(shard, batch))
  redis.call('DEL', calls_key(shard, batch))
  redis.call('ZREM', shard .. OPEN, batch)
  return {'closed'}
end

redis.register_function('deck_batch_ask', ask)
redis.register_function('deck_batch_put', put)
redis.register_function('deck_batch_drop', drop)
redis.register_function('deck_batch_seal', seal)
redis.register_function('deck_batch_due', due)
redis.register_function('deck_batch_lease', lease)
redis.register_function('deck_batch_note', note)
redis.register_function('deck_batch_deliver', deliver)
redis.register_function('deck_batch_close', close)
