-- Model calls on their way through a provider's batch API: waiting calls, sent batches, results.
--
-- Every function takes KEYS shard base ('deck:{0}') and derives the real keys from it:
--   :batch:lanes                   hash  lane -> the description that a worker needs to serve it
--   :batch:queue:<lane>            sorted set of conversations, by arrival time
--   :batch:call:<conversation>     hash  step, seen, lane, batch, body, bytes, result
--   :batch:open                    sorted set of open batches, by the time of the next check
--   :batch:about:<batch>           hash  lane, state, worker, until, …; further fields are the workers'
--   :batch:calls:<batch>           hash  number -> '<conversation> <step>'
--   :batch:known                   sorted set of the providers' ids of batches, by the time they became known
--   :workers
-- A conversation has at most one call; `step` identifies it: '<iteration>.<attempt>'. Times are milliseconds.
--
-- A batch is recorded with its calls before it is sent. A worker that finds a batch sent by a dead worker looks for it at
-- the provider before it sends it again. At most one live worker has the lease of a batch. A lane exists while calls wait
-- in it; a batch contains everything needed to serve it. If the store has lost a part of a batch or a queue, it ends: its
-- calls are deleted, and their conversations queue them again.

local store = require('store/prelude')

local LANES, OPEN, KNOWN = ':batch:lanes', ':batch:open', ':batch:known'
local KNOWN_MS = 7 * 86400000

local function call_key(shard, cid) return shard .. ':batch:call:' .. cid end

local function queue_key(shard, lane) return shard .. ':batch:queue:' .. lane end

local function about_key(shard, batch) return shard .. ':batch:about:' .. batch end

local function calls_key(shard, batch) return shard .. ':batch:calls:' .. batch end

-- Whether a worker may work on a batch: it has no live holder, or the holder's lease has expired.
local function is_free(shard, batch, worker, now)
  local about = about_key(shard, batch)
  local holder = store.get(about, 'worker')
  if not holder or holder == '' or holder == worker or not store.alive(shard, holder) then return true end
  return now >= (tonumber(store.get(about, 'until')) or 0)
end

-- Return the key; if it has another type than a hash, it is moved away first.
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

-- Whether a call without a result is in an open batch, or in the queue of an existing lane.
local function is_under_way(shard, cid, batch, lane)
  if batch then return store.is_there(shard, shard .. OPEN, 'zset') and redis.call('ZSCORE', shard .. OPEN, batch) end
  local queue = queue_key(shard, lane or '')
  return store.is_there(shard, queue, 'zset') and redis.call('ZSCORE', queue, cid)
    and store.is_there(shard, shard .. LANES, 'hash') and store.get(shard .. LANES, lane)
end

-- deck_batch_ask: return the status of a conversation's call.  ARGV cid, step
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

-- deck_batch_put: queue a call for a batch; deletes a call of an earlier step.
-- ARGV cid, step, seen, lane, description of the lane, body, bytes.  returns {'put'}
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

-- deck_batch_drop: delete a conversation's call, because it is not needed or its result was read.  ARGV cid, step or '' for
-- any
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

-- The size of a waiting call in bytes; nil if it does not exist.
local function size_of(shard, cid)
  local call = call_key(shard, cid)
  return store.get(call, 'step') and tonumber(store.get(call, 'bytes'))
end

-- deck_batch_seal: make a batch of the waiting calls, if there are enough or the first has waited long enough.
-- ARGV lane, batch, worker, lease ms, maximum calls, maximum bytes, maximum wait in ms
-- returns {'sealed', number of calls} {'early', ms until it is time}; an empty queue is {'early', -1}, and ends the lane
local function seal(keys, args)
  local shard, lane, batch, worker, now = keys[1], args[1], args[2], args[3], store.now_ms(keys[1])
  local queue, most, most_bytes = queue_key(shard, lane), tonumber(args[5]), tonumber(args[6])
  local waiting = store.is_there(shard, queue, 'zset') and redis.call('ZRANGE', queue, 0, most - 1) or {}
  if #waiting == 0 then
    redis.call('HDEL', shard .. LANES, lane)  -- its batches keep its description
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

-- deck_batch_due: return the batches that need attention now. Moves keys of another type away.
-- ARGV maximum number.  returns {'due', batch …}
local function due(keys, args)
  local shard, open, now = keys[1], keys[1] .. OPEN, store.now_ms(keys[1])
  read_hash(shard, shard .. LANES)
  store.is_there(shard, shard .. KNOWN, 'zset')
  if not store.is_there(shard, open, 'zset') then return {'due'} end
  return {'due', unpack(redis.call('ZRANGEBYSCORE', open, '-inf', now, 'LIMIT', 0, args[1]))}
end

-- The fields of a batch if they are complete; otherwise nil.
local function usable(about)
  local found = store.pairs_of(redis.call('HGETALL', about))
  local is_sent = not found['sent_ms'] or store.number_of(found['sent_ms'])
  return found['lane'] and store.number_of(found['count']) and is_sent and found
end

-- Delete a batch, and its calls without a result. Returns {'lost', conversations of these calls …}.
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

-- deck_batch_lease: lease a batch.  ARGV batch, worker, lease ms
-- returns {'leased', field, value …} {'busy'} {'lost', cid …}: the store has lost its fields, and it has ended
--   field 'waited_ms': time since it was recorded as being sent
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

-- deck_batch_note: the holder of a batch's lease records its state. A time until the next check ends the lease.
-- ARGV batch, worker, ms until the next check or '' to keep the lease, field, value …; an empty value deletes the field.
-- The field `provider` is the provider's id of the batch: it has been sent, so the bodies are no longer needed.
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

-- deck_batch_deliver: store the result of a call when it is first reported.  ARGV batch, number, result
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

-- deck_batch_close: delete a batch that has ended.  ARGV batch, worker.  returns {'closed'} {'lost'}
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
