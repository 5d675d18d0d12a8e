-- Results: the observations of tool workers whose store user may not add to logs. They wait beside the log until a
-- controller settles them, which needs the capability that came with the action. Where tool workers may add to logs, as in
-- a store without users for roles, they do so at once.
-- Keys:  conversation base  :results  stream  a=action w=worker k=capability s=checksum f=fingerprint u=used e=bytes
--                                     tool workers may add to it, and read and remove nothing
--                           :grants   hash    action -> its capability; tool workers may neither read nor write it
--        shard base         :worker:<id>:mail stream   r=1: there are results to settle

local store = require('store/prelude')
local wakeups = require('log/lua/wakeups')
local results = {}

local SETTLED_AT_ONCE = 64

-- Make the capability of an action that is dispatched. The caller brings the randomness; an earlier version brings none,
-- and a user with the rights of an earlier version may not write it.
function results.grant(base, cid, action, seed)
  local grants = base .. ':grants'
  if not seed or seed == '' or not store.may('HSET', grants, action, '') then return nil end
  local capability = redis.sha1hex(seed .. ' ' .. cid .. ' ' .. action)
  redis.call('HSET', grants, action, capability)
  return capability
end

-- Whether an action has its capability. One that was dispatched with the rights of an earlier version has none.
function results.is_granted(base, action)
  local grants = base .. ':grants'
  return not store.may('HEXISTS', grants, action) or redis.call('HEXISTS', grants, action) == 1
end

function results.forget_grant(base, action)
  if store.may('HDEL', base .. ':grants', action) then redis.call('HDEL', base .. ':grants', action) end
end

-- Whether the caller has to leave what it would append.
function results.must_wait(base)
  return not store.may('XADD', base .. ':events', '*', 'e', '')
end

local function tell(shard, meta, cid, owner, notified, now)
  if owner then redis.call('XADD', shard .. ':worker:' .. owner .. ':mail', '*', 'c', cid, 'r', '1')
  else wakeups.notify_unless(notified, owner, shard, meta, cid, now) end
end

-- Leave an observation. The capability came with the entry of the action.
function results.leave(shard, base, cid, call, bytes, owner, notified, now)
  local stream, entry = string.match(call.place or '', '^(.*)|(%d+%-%d+)$')
  local carried = stream and redis.call('XRANGE', stream, entry, entry) or {}
  local capability = #carried == 1 and store.pairs_of(carried[1][2])['k'] or ''
  redis.call('XADD', base .. ':results', '*', 'a', call.action, 'w', call.worker, 'k', capability, 's', call.checksum,
    'f', call.fingerprint or '', 'u', call.uses == false and '0' or '1', 'e', bytes)
  tell(shard, base .. ':meta', cid, owner, notified, now)
end

-- Leave the news that the log has lost an event, '<id>:<checksum or fingerprint>'. A controller checks it.
function results.leave_gap(shard, base, cid, gap, owner, notified, now)
  redis.call('HSET', base .. ':meta', 'reported_gap', gap)
  tell(shard, base .. ':meta', cid, owner, notified, now)
end

-- Whether results wait. A user with the rights of an earlier version may not ask; then tool workers leave none either.
function results.are_waiting(base)
  return store.may('EXISTS', base .. ':results') and redis.call('EXISTS', base .. ':results') == 1
end

-- Append the results that wait, each once, if it has the capability of an action that was claimed and is not settled.
-- is_quiet: the caller tells the owner by its reply
function results.settle(base, shard, cid, is_quiet)
  local key, once = base .. ':results', base .. ':once'
  if not results.are_waiting(base) or not store.is_there(shard, key, 'stream') then return end
  for _, item in ipairs(redis.call('XRANGE', key, '-', '+', 'COUNT', SETTLED_AT_ONCE)) do
    local found = store.pairs_of(item[2])
    local action = string.match(found['a'] or '', '^%d+$')
    local granted = action and redis.call('HGET', base .. ':grants', action)
    local claimer = action and store.get(once, 'w:' .. action)
    if granted and granted == found['k'] and claimer == found['w'] and found['e'] then
      local call = {by = 'tool', worker = found['w'], action = action, checksum = found['s'], fingerprint = found['f'],
        uses = found['u'] ~= '0', events = {{answers = action}}, is_quiet = is_quiet}
      store.attempt(shard, key, item[1], results.append, {base, shard}, {cid, '', found['e']}, call)
    elseif not (action and store.get(once, 'o:' .. action)) then
      store.note_unreadable(shard, key, item[1], 'a result without the capability of its action', found['w'])
    end
    redis.call('XDEL', key, item[1])
  end
  if redis.call('XLEN', key) == 0 then redis.call('DEL', key) end
end

-- settle: append the results of tool workers that wait.
-- KEYS conversation base, shard base.  ARGV cid.
-- returns {'settled', what a tool worker says that the log has lost, '<id>:<checksum or fingerprint>', or ''}
local function settle(keys, args)
  results.settle(keys[1], keys[2], args[1], false)
  local meta = keys[1] .. ':meta'
  local gap = store.get(meta, 'reported_gap')
  if gap then redis.call('HDEL', meta, 'reported_gap') end
  return {'settled', gap or ''}
end

redis.register_function('deck_settle', settle)

return results
