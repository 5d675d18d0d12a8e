-- Results: the observations of tool workers whose store user may not add to logs. They wait beside the log until a
-- controller settles them, which needs the capability that came with the action. The functions cannot read an event, which
-- may be encrypted: a controller reads it, and hands in those bytes that answer the action. Where tool workers may add to
-- logs, as in a store without users for roles, they do so at once.
-- Keys:  conversation base  :results  stream  a=action w=worker k=capability s=checksum f=fingerprint u=used e=bytes
--                                     tool workers may add to it, and read and remove nothing. s=stop: not an observation,
--                                     but the news that a stopped action has ended
--                           :grants   hash    action -> '<SHA-1 of its capability> <its seal>', or 'stopped' in place of the
--                                     seal when its controller has answered it; tool workers only read it
--        shard base         :worker:<id>:mail stream   r=1: there are results to settle

local history = require('log/lua/history')
local store = require('store/prelude')
local wakeups = require('log/lua/wakeups')
local results = {}

local PAGE = 64
local MOST_MARK = 64              -- digits of a checksum or fingerprint
local LOOKED_AT = 1024            -- results by one call
local MOST_BYTES = 4194304        -- of the results in one reply, but at least one

-- Instead of the claimer of an action whose result was refused: it may have run, so its next worker asks the journal.
results.REFUSED = '-'
results.STOP = 'stop'

local STOPPED = ' stopped'

-- Make the capability of an action that is dispatched, and seal what may run for it. The caller brings the randomness; an
-- earlier version brings none, and a user with the rights of an earlier version may not write it.
-- route: 'pool:<name>' if any node of that pool may run it, and no other pool; otherwise nil
function results.grant(base, cid, action, seed, bytes, route, workspace)
  local grants = base .. ':grants'
  if not seed or seed == '' or not store.may('HSET', grants, action, '') then return nil end
  local capability = redis.sha1hex(seed .. ' ' .. cid .. ' ' .. action)
  local seal = redis.sha1hex(table.concat({action, route or 'bound', redis.sha1hex(workspace), bytes}, ' '))
  redis.call('HSET', grants, action, redis.sha1hex(capability) .. ' ' .. seal)
  return capability
end

-- Whether a tool worker may run what it has in hand for an action: only what was dispatched. Where tool workers could write
-- the seals, they are not compared; and an earlier version does not say what it has in hand.
function results.may_run(base, action, seal)
  local grants = base .. ':grants'
  if not seal or store.may('HSET', grants, action, '') or not store.may('HGET', grants, action) then return true end
  return string.match(store.get(grants, action) or '', ' (%x+)$') == seal
end

-- Whether an action has its capability. One that was dispatched with the rights of an earlier version has none.
function results.is_granted(base, action)
  local grants = base .. ':grants'
  return not store.may('HEXISTS', grants, action) or redis.call('HEXISTS', grants, action) == 1
end

function results.forget_grant(base, action)
  if store.may('HDEL', base .. ':grants', action) then redis.call('HDEL', base .. ':grants', action) end
end

-- Keep nothing of the grant of an action that its controller has answered, but the capability: for the news that it has
-- ended. Tool workers can write what `once` says of it, and not this.
function results.stop_grant(base, action)
  local grants = base .. ':grants'
  local granted = store.may('HSET', grants, action, '') and store.get(grants, action)
  if granted then redis.call('HSET', grants, action, string.sub(granted, 1, 40) .. STOPPED) end
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
  local id, mark = string.match(gap, '^(%d+):(%x*)$')
  if not id or #id > 16 or #mark > MOST_MARK then return end
  redis.call('HSET', base .. ':meta', 'reported_gap', gap)
  tell(shard, base .. ':meta', cid, owner, notified, now)
end

-- Leave the news that a stopped action has ended. A controller reads it; it is appended once for each action.
function results.leave_stop(shard, base, cid, action, capability, bytes, owner, notified, now)
  redis.call('XADD', base .. ':results', '*', 'a', action, 's', results.STOP, 'k', capability or '', 'e', bytes)
  tell(shard, base .. ':meta', cid, owner, notified, now)
end

-- Whether results wait. A user with the rights of an earlier version may not ask; then tool workers leave none either.
function results.are_waiting(base)
  return store.may('EXISTS', base .. ':results') and redis.call('EXISTS', base .. ':results') == 1
end

-- Whether a result waits that may be accepted: of an action with a capability that nothing has answered.
function results.may_be_accepted(base)
  local grants = base .. ':grants'
  if not results.are_waiting(base) or not store.may('HGETALL', grants) then return false end
  for _, granted in ipairs(redis.call('HGETALL', grants)) do
    if #granted > 41 and string.sub(granted, 41) ~= STOPPED then return true end
  end
  return false
end

-- Tell the owner that claims a conversation that results wait.
function results.tell_owner(shard, base, cid, owner)
  if results.are_waiting(base) or store.get(base .. ':meta', 'reported_gap') then
    redis.call('XADD', shard .. ':worker:' .. owner .. ':mail', '*', 'c', cid, 'r', '1')
  end
end

-- The action of a result with the capability of an action that was claimed and is not settled; otherwise nil.
local function action_of(base, found)
  local action = string.match(found['a'] or '', '^%d+$')
  local granted = action and redis.call('HGET', base .. ':grants', action)
  local claimer = action and store.get(base .. ':once', 'w:' .. action)
  if not granted or string.sub(granted, 1, 40) ~= redis.sha1hex(found['k'] or '') then return nil end
  if string.sub(granted, 41) == STOPPED then return nil end
  return claimer == found['w'] and found['e'] and action or nil
end

-- Whether an action was answered by its controller, and not by a tool worker: only that has a fingerprint.
function results.was_stopped(base, action)
  local settled = store.get(base .. ':once', 'o:' .. action)
  return settled and not string.match(settled, '^%d+:%d+:[^:]*:.')
end

-- The action whose end is news: it was stopped, and no such news has used its capability; otherwise nil.
local function stop_of(base, found)
  local action = found['s'] == results.STOP and found['e'] and string.match(found['a'] or '', '^%d+$')
  local granted = action and redis.call('HGET', base .. ':grants', action)
  return granted == redis.sha1hex(found['k'] or '') .. STOPPED and action or nil
end

-- Refuse a result. Its claimer is alive and has done what it would do, so the action has to be dispatched again.
local function refuse(base, shard, key, id, found, why)
  local once, action = base .. ':once', string.match(found['a'] or '', '^%d+$')
  if action and store.get(once, 'o:' .. action) then return end
  store.note_unreadable(shard, key, id, why, found['w'])
  if action and found['w'] and store.get(once, 'w:' .. action) == found['w'] then
    redis.call('HSET', once, 'w:' .. action, results.REFUSED)
    redis.call('HDEL', once, 'q:' .. action)
  end
end

-- Append the event of a result that a controller has read; '' refuses it.
local function finish(base, shard, cid, id, action, bytes)
  local key = base .. ':results'
  local item = redis.call('XRANGE', key, id, id)[1]
  local found = item and store.pairs_of(item[2])
  if found and action_of(base, found) == action then
    local why = 'a result that does not answer its action'
    if bytes ~= '' then
      local call = {by = 'tool', worker = found['w'], action = action, checksum = found['s'], fingerprint = found['f'],
        uses = found['u'] ~= '0', events = {{answers = action}}}
      store.attempt(shard, key, id, results.append, {base, shard}, {cid, '', bytes}, call)
      why = store.get(base .. ':meta', 'closed') and '' or 'a result that could not be added to the log'
    end
    if why ~= '' then refuse(base, shard, key, id, found, why) end
    redis.call('XDEL', key, id)
  elseif found and stop_of(base, found) == action then
    local call = {by = 'producer', key = 'party_stopped:' .. action, quiet = true, events = {{}}}
    if bytes ~= '' then store.attempt(shard, key, id, results.append, {base, shard}, {cid, '', bytes}, call) end
    redis.call('XDEL', key, id)
  end
end

-- Add the results with a capability to a reply, and remove the others. Returns whether more may wait.
local function collect(base, shard, reply)
  local key, from, size = base .. ':results', '-', 0
  for _ = 1, LOOKED_AT / PAGE do
    local page = redis.call('XRANGE', key, from, '+', 'COUNT', PAGE)
    for _, item in ipairs(page) do
      local id, found = item[1], store.pairs_of(item[2])
      local action = action_of(base, found) or stop_of(base, found)
      if not action then
        -- Only one that was dispatched by an earlier version has none: the others may be anyone's.
        local named = string.match(found['a'] or '', '^%d+$')
        if named and results.is_granted(base, named) then found['w'] = nil end
        refuse(base, shard, key, id, found, 'a result without the capability of its action')
        redis.call('XDEL', key, id)
      else
        if size > 0 and size + #found['e'] > MOST_BYTES then return true end
        size = size + #found['e']
        for _, part in ipairs({id, action, history.bytes_of(base, action) or '', found['e']}) do
          reply[#reply + 1] = part
        end
      end
      from = '(' .. id
    end
    if #page < PAGE then return false end
  end
  return true
end

-- settle: append the results of tool workers that a controller has read, and return those that it has to read.
-- KEYS conversation base, shard base.  ARGV cid, a reported loss that is recorded or disproved, or '',
--      then for each result its id, its action and the bytes to append, or '' to refuse it
-- returns {'settled', what a tool worker says that the log has lost, '<id>:<checksum or fingerprint>', or '',
--          '1' if more results wait, then for each result its id, its action, the action's bytes and the result's}
local function settle(keys, args)
  local base, shard, meta = keys[1], keys[2], keys[1] .. ':meta'
  if args[2] and args[2] ~= '' and store.get(meta, 'reported_gap') == args[2] then
    redis.call('HDEL', meta, 'reported_gap')
  end
  local reply, key = {'settled', store.get(meta, 'reported_gap') or '', ''}, base .. ':results'
  if not store.is_there(shard, key, 'stream') then return reply end
  for at = 3, #args, 3 do finish(base, shard, args[1], args[at], args[at + 1], args[at + 2]) end
  if collect(base, shard, reply) then reply[3] = '1' end
  if redis.call('XLEN', key) == 0 then redis.call('DEL', key) end
  return reply
end

redis.register_function('deck_settle', settle)

return results
