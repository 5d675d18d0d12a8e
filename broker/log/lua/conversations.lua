-- Conversations: close, expire and delete them.
-- Keys:  shard base  :expiring  zset  conversation -> when it expires   :awaited  zset  conversation -> when to check it

local admission = require('log/lua/admission')
local groups = require('log/lua/groups')
local labels = require('log/lua/labels')
local results = require('log/lua/results')
local store = require('store/prelude')
local turns = require('log/lua/turns')
local conversations = {}

conversations.FIRST_LOOK_MS = 5000       -- when an ingress worker checks an awaited conversation without a notice

-- close: refuse all further events.  ARGV cid.  returns {'closed'} {'missing'}
local function close(keys, args)
  local meta, shard, cid = keys[1] .. ':meta', keys[2], args[1]
  if not store.get(meta, 'last_id') then return {'missing'} end
  redis.call('HSET', meta, 'closed', '1')
  redis.call('ZREM', shard .. ':dead', cid)
  local node, open_in = store.get(meta, 'node'), store.get(meta, 'open_in')
  if open_in then admission.count_open(shard, open_in, cid, 'finished') end
  if node then redis.call('XADD', shard .. ':act:node:' .. node, '*', 'c', cid, 'a', '0', 'x', 'close') end
  return store.with_acks({'closed'}, store.get(meta, 'acks'))
end

-- begin_deletion: refuse all further events permanently. The conversation is listed until `end_deletion` deletes it.
-- ARGV  cid, last id of the log at which the caller found it settled
-- returns  {'begun'} {'owned', worker} {'news', last} {'missing'}
local function begin_deletion(keys, args)
  local base, meta, shard = keys[1], keys[1] .. ':meta', keys[2]
  local last, owner = store.get(meta, 'last_id'), store.get(meta, 'owner')
  if not last then return {'missing'} end
  if owner and store.alive(shard, owner) then return {'owned', owner} end
  if store.get(meta, 'awaited') then return {'owned', 'an ingress, which has to tell its caller'} end
  if last ~= args[2] or results.may_be_accepted(base) then return {'news', tonumber(last)} end
  redis.call('HSET', meta, 'closed', '1', 'deleted', '1')
  return {'begun'}
end

-- end_deletion: delete a conversation after begin_deletion: its keys, and its members in other keys. Its blobs and files
-- must be deleted before, because its log names them.
-- ARGV  cid.  returns  {'deleted'} {'kept'} {'missing'}   kept: begin_deletion was not called
local function end_deletion(keys, args)
  local base, shard, cid = keys[1], keys[2], args[1]
  local meta = base .. ':meta'
  if not store.get(meta, 'last_id') then return {'missing'} end
  if not store.get(meta, 'deleted') then return {'kept'} end
  local node, owner = store.get(meta, 'node'), store.get(meta, 'owner')
  if node then redis.call('XADD', shard .. ':act:node:' .. node, '*', 'c', cid, 'a', '0', 'x', 'close') end
  if owner then redis.call('SREM', shard .. ':worker:' .. owner .. ':owned', cid) end
  local open_in = store.get(meta, 'open_in')
  if open_in then admission.count_open(shard, open_in, cid, 'finished') end
  labels.leave(shard, meta, cid)
  for _, name in ipairs({'index', 'unread', 'parked', 'dead', 'awaited', 'expiring', 'news'}) do
    redis.call('ZREM', shard .. ':' .. name, cid)
  end
  local stream, entry = groups.place_in(store.get(meta, 'ready_id') or '', shard .. ':ready')
  if entry == turns.WAITING then turns.leave_line(shard, stream, cid) end
  for _, name in ipairs({'events', 'once', 'snapshot', 'live', 'watched', 'secrets', 'masked', 'secrets_of', 'caller',
    'caller:lock', 'results', 'grants', 'meta'}) do
    redis.call('UNLINK', base .. ':' .. name)
  end
  return {'deleted'}
end

-- The scheduled conversations that have expired. Removes those that are no longer scheduled from the set.
function conversations.find_expired(shard, now)
  local found = {}
  for _, cid in ipairs(redis.call('ZRANGEBYSCORE', shard .. ':expiring', '-inf', now, 'LIMIT', 0, 64)) do
    local meta = shard .. ':c:' .. cid .. ':meta'
    local planned = store.is_there(shard, meta, 'hash') and redis.call('HMGET', meta, 'planned', 'closed')
    if planned and planned[1] == 'waiting' and not planned[2] then
      found[#found + 1] = cid
      -- One that cannot be ended must not block others.
      redis.call('ZADD', shard .. ':expiring', now + conversations.FIRST_LOOK_MS, cid)
    else redis.call('ZREM', shard .. ':expiring', cid) end
  end
  return found
end

redis.register_function('deck_close', close)
redis.register_function('deck_begin_deletion', begin_deletion)
redis.register_function('deck_end_deletion', end_deletion)

return conversations
