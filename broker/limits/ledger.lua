-- Budgets: reserve the worst-case cost of a call before it, and charge its actual cost after it.
--
-- Every function takes KEYS shard base ('deck:{0}') and derives the real keys from it:
--   :budget:<account>    hash  limit, spent, reserved, lost, lost_calls, calls, own, parent, change, deleted
--   :budget:<account>:children|waiting|wanted     :budgets    :ledger:held|lost|swept|crowded    :workers
--   :limits              hash  '<account>' -> its limit   'change <account>' -> keys of its latest changes. Only servers and
--                        operators may write it. The field `limit` of an account is a copy, which older versions read.
-- An account is 'conversation:<id>', 'experiment:<tenant>/<name>' or 'tenant:<name>'. Each has at most one parent; spending
-- in an account counts in all accounts above it. Amounts are nano-USD: integers, so that sums are exact.
--
-- A conversation is charged by the sum of its whole log, so a repeated or late charge adds nothing. `own` is that sum;
-- `spent` includes its delegates. The reservation of a call whose worker died, or whose reply was cut off, becomes `lost`:
-- the provider may bill it, so it counts against the limit, but it is not `spent`. The reservation of a call in a
-- provider's batch has no worker ('-') and ends with the reply.
-- The account of a conversation is deleted with it. If it then has a limit, delegates or a call in flight, it is deleted
-- with the last of these: until then, and for a day after, it is marked `deleted`, because a repeated charge would charge
-- the whole log again.
--
-- Conversations that wait for an account are served in order of arrival. No overtaking: if smaller calls went first, a
-- large one could wait for ever. Funds are reserved for a woken conversation, but not for long: if it does not respond, it
-- keeps its place for a while and does not block others.

local fair_queue = require('limits/fair_queue')
local store = require('store/prelude')

local SWEEP_MS, MAX_DEPTH = 500, 24
local CHANGES_CHARS = 1000     -- maximum length of the remembered keys of limit changes
local DELETED_MS = 86400000

local function budget(shard, account) return shard .. ':budget:' .. account end

-- The limit of an account; nil without one. What is not in :limits was set by an older version: the copy counts.
local function limit_of(shard, account)
  local found = redis.pcall('HGET', shard .. ':limits', account)
  if type(found) == 'string' then return found end
  return store.get(budget(shard, account), 'limit')
end

local function number(key, field) return tonumber(store.get(key, field)) or 0 end

local function add(shard, chain, field, amount)
  if amount == 0 then return end
  for _, account in ipairs(chain) do
    local key, change = budget(shard, account), string.format('%.0f', amount)
    local answer = redis.pcall('HINCRBY', key, field, change)
    local text = type(answer) == 'table' and answer.err or ''
    if string.find(text, 'not an integer', 1, true) or string.find(text, 'overflow', 1, true) then
      store.note_unreadable(shard, key, field, 'not a whole number', store.get(key, field))
      redis.call('HSET', key, field, change)
    elseif type(answer) == 'table' then error(answer) end
  end
end

-- An account and all accounts above it.
local function chain_of(shard, account)
  local chain = {}
  while account and #chain < MAX_DEPTH do
    chain[#chain + 1] = account
    account = store.get(budget(shard, account), 'parent')
  end
  return chain
end

-- Create the accounts, each as a child of the next.
local function enroll(shard, accounts)
  for i, account in ipairs(accounts) do
    if redis.call('EXISTS', budget(shard, account)) == 0 then redis.call('HSET', budget(shard, account), 'spent', 0) end
    local parent = accounts[i + 1]
    if parent and redis.call('HSETNX', budget(shard, account), 'parent', parent) == 1 then
      redis.call('SADD', budget(shard, parent) .. ':children', account)
    end
    if string.sub(account, 1, 13) ~= 'conversation:' then redis.call('SADD', shard .. ':budgets', account) end
  end
end

local function accounts_from(args, first)
  local accounts = {}
  for i = first, #args do accounts[#accounts + 1] = args[i] end
  return accounts
end

-- held, lost: '<amount> <worker> <token> <account>'
local function reserved_for(shard, cid, where)
  local text = store.get(shard .. ':ledger:' .. where, cid)
  if not text then return nil end
  local amount, worker, token, account = string.match(text, '^(%S+) (%S+) (%S+) (.+)$')
  if not (tonumber(amount) and tonumber(token)) then
    redis.call('HDEL', shard .. ':ledger:' .. where, cid)
    store.note_unreadable(shard, shard .. ':ledger:' .. where, cid, 'not what is written for a call', text)
    return nil
  end
  return {amount = tonumber(amount), worker = worker, token = tonumber(token), account = account, text = text}
end

local function give_back(shard, cid, held)
  redis.call('HDEL', shard .. ':ledger:held', cid)
  add(shard, chain_of(shard, held.account), 'reserved', -held.amount)
end

-- Expire the account of a deleted conversation once nothing keeps it, and then the accounts above that it has kept. The
-- caller may have no rights to accounts of other kinds.
local function drop_deleted(shard, account)
  for _ = 1, MAX_DEPTH do
    local key, cid = budget(shard, account), string.match(account, '^conversation:(.*)$')
    if not cid then return end
    local parent, deleted = unpack(redis.call('HMGET', key, 'parent', 'deleted'))
    if not deleted or limit_of(shard, account) or redis.call('HEXISTS', shard .. ':ledger:held', cid) == 1
      or redis.call('SCARD', key .. ':children') > 0 then return end
    redis.call('HDEL', shard .. ':ledger:lost', cid)
    redis.call('DEL', key .. ':children', key .. ':waiting', key .. ':wanted')
    redis.call('PEXPIRE', key, DELETED_MS)
    if not parent then return end
    redis.call('SREM', budget(shard, parent) .. ':children', account)
    account = parent
  end
end

local function lose(shard, cid, held)
  give_back(shard, cid, held)
  local chain = chain_of(shard, held.account)
  add(shard, chain, 'lost', held.amount)
  add(shard, chain, 'lost_calls', 1)
  redis.call('HSET', shard .. ':ledger:lost', cid, held.text)
  drop_deleted(shard, held.account)
end

-- Reset the account of a deleted conversation for a new one with the same id.
local function begin_again(shard, cid, account, token)
  local key = budget(shard, account)
  if not store.get(key, 'deleted') then return end
  local held = reserved_for(shard, cid, 'held')
  if held and held.token >= token then return end  -- the deleted one's owner repeats its request
  if held then lose(shard, cid, held) end
  redis.call('HDEL', shard .. ':ledger:lost', cid)
  if not limit_of(shard, account) and redis.call('SCARD', key .. ':children') == 0 then
    redis.call('DEL', key)
    return
  end
  redis.call('HDEL', key, 'deleted')
  redis.call('PERSIST', key)
  redis.call('HSET', key, 'own', 0)
  local parent = store.get(key, 'parent')
  if parent then redis.call('SADD', budget(shard, parent) .. ':children', account) end
end

-- Charge the total of a conversation's log. A reply that is in the log was not lost. A reservation with an older token
-- than the caller's is a former owner's, whose call has ended.
local function charge(shard, cid, account, token, total)
  local chain = chain_of(shard, account)
  local delta = total - number(budget(shard, account), 'own')
  local has_new_events = delta > 0
  if has_new_events then
    redis.call('HSET', budget(shard, account), 'own', string.format('%.0f', total))
    add(shard, chain, 'spent', delta)
    add(shard, chain, 'calls', 1)
  end
  local lost = reserved_for(shard, cid, 'lost')
  if lost then
    redis.call('HDEL', shard .. ':ledger:lost', cid)
    if has_new_events then
      add(shard, chain_of(shard, lost.account), 'lost', -lost.amount)
      add(shard, chain_of(shard, lost.account), 'lost_calls', -1)
    end
  end
  local held = reserved_for(shard, cid, 'held')
  if held and held.worker == '-' then
    if has_new_events then give_back(shard, cid, held) end
  elseif held and held.token < token then
    if has_new_events then give_back(shard, cid, held) else lose(shard, cid, held) end
    redis.call('HDEL', shard .. ':ledger:lost', cid)
  end
end

-- The current limit and commitments of an account; nil without a limit.
local function room_of(shard, account)
  local key = budget(shard, account)
  local limit = limit_of(shard, account)
  if not limit then return nil end
  limit = tonumber(limit) or 0  -- an invalid limit allows nothing
  local reserved = number(key, 'reserved')
  return {limit = limit, reserved = reserved, committed = number(key, 'spent') + number(key, 'lost') + reserved}
end

-- Whether an account can pay an amount. The last call may exceed the limit if it is the only one in flight.
local function fits(room, amount)
  if not room then return true end
  if room.committed >= room.limit then return false end
  return room.committed + amount <= room.limit or room.reserved == 0
end

local function set_aside(room, amount)
  if not room then return end
  room.reserved, room.committed = room.reserved + amount, room.committed + amount
end

-- wanted: conversation → '<amount> <when it was last woken> <how often>'
local function waiter_of(key, cid)
  local amount, at, wakes = string.match(store.get(key .. ':wanted', cid) or '', '^(%S+) (%S+) (%d+)$')
  if not (tonumber(amount) and tonumber(at)) then return nil end
  return {amount = tonumber(amount), at = tonumber(at), wakes = tonumber(wakes) or 0}
end

local function note(key, cid, waiter)
  redis.call('HSET', key .. ':wanted', cid, string.format('%.0f %.0f %d', waiter.amount, waiter.at, waiter.wakes))
end

local function leave(key, cid)
  fair_queue.leave(key .. ':waiting', cid)
  redis.call('HDEL', key .. ':wanted', cid)
end

-- Go through the waiting conversations of an account in order, and set aside their amounts.
-- Returns those that may call now, whether the end of the queue was reached, and the remaining room (nil without a limit).
local function served(shard, account, now)
  local key, room, turn = budget(shard, account), room_of(shard, account), {}
  local waiting, is_whole = fair_queue.scan(key .. ':waiting')
  for _, cid in ipairs(waiting) do
    local waiter = waiter_of(key, cid)
    if not waiter then leave(key, cid) end  -- if it still waits, it asks again
    waiter = waiter or {amount = 0, at = now, wakes = 2}
    local is_late = waiter.wakes > 1 or (waiter.wakes == 1 and now - waiter.at >= fair_queue.PATIENCE_MS)
    if fits(room, waiter.amount) then
      turn[#turn + 1] = cid
      turn[cid] = true
      if not is_late then set_aside(room, waiter.amount) end
    elseif not is_late then
      return turn, false
    end
  end
  return turn, is_whole, room
end

-- Since when a conversation waits for one of these accounts; nil if it does not wait.
local function waits_since(shard, chain, cid)
  for _, account in ipairs(chain) do
    local since = fair_queue.place_in(budget(shard, account) .. ':waiting', cid)
    if since then return since end
  end
  return nil
end

local function stand(shard, account, cid, amount, since)
  local key = budget(shard, account)
  fair_queue.join(key .. ':waiting', cid, since)
  redis.call('SADD', shard .. ':ledger:crowded', account)
  note(key, cid, {amount = amount, at = 0, wakes = 0})
end

-- Whether a conversation may spend an amount from an account. If it waits for another account, by its time of arrival.
local function may_spend(shard, account, cid, amount, since, now)
  if since then
    stand(shard, account, cid, amount, since)
    local turn = served(shard, account, now)
    return turn[cid] or false
  end
  if redis.call('ZCARD', budget(shard, account) .. ':waiting') == 0 then return fits(room_of(shard, account), amount) end
  local _, is_open, left = served(shard, account, now)
  return is_open and fits(left, amount)
end

local function stop_waiting(shard, chain, cid)
  for _, account in ipairs(chain) do leave(budget(shard, account), cid) end
end

-- Wake the conversations whose turn it is in an account, unless they were woken a moment ago.
local function wake_of(shard, account, now, woken)
  local key = budget(shard, account)
  for _, cid in ipairs(served(shard, account, now)) do
    local waiter = waiter_of(key, cid)
    if waiter and (waiter.wakes == 0 or now - waiter.at >= fair_queue.PATIENCE_MS) then
      if waiter.wakes >= fair_queue.MAX_WAKES then
        leave(key, cid)
      else
        waiter.at, waiter.wakes = now, waiter.wakes + 1
        note(key, cid, waiter)
        woken[#woken + 1] = cid
      end
    end
  end
  if redis.call('ZCARD', key .. ':waiting') == 0 then redis.call('SREM', shard .. ':ledger:crowded', account) end
end

local function wake(shard, chain, now)
  local woken = {}
  for _, account in ipairs(chain) do
    store.attempt(shard, budget(shard, account), '', wake_of, shard, account, now, woken)
  end
  return woken
end

local function extend(list, others)
  for _, other in ipairs(others) do list[#list + 1] = other end
  return list
end

-- Move the reservations of dead workers to `lost`, and wake conversations that waited for one that does not respond.
local function sweep(shard, now)
  local swept = tonumber(redis.call('GET', shard .. ':ledger:swept') or 0) or 0
  if now - swept < SWEEP_MS then return {} end
  redis.call('SET', shard .. ':ledger:swept', string.format('%.0f', now))
  local is_alive, flat = {['-'] = true}, redis.call('HGETALL', shard .. ':ledger:held')
  for i = 1, #flat, 2 do
    local held = reserved_for(shard, flat[i], 'held')
    if held then
      if is_alive[held.worker] == nil then is_alive[held.worker] = store.alive(shard, held.worker) end
      -- Once its conversation is deleted, the reply to a call in a batch has no receiver.
      local is_over = held.worker == '-' and redis.pcall('HEXISTS', budget(shard, held.account), 'deleted') == 1
      if is_over or not is_alive[held.worker] then
        store.attempt(shard, shard .. ':ledger:held', flat[i], lose, shard, flat[i], held)
        redis.call('HDEL', shard .. ':ledger:held', flat[i])
      end
    end
  end
  return wake(shard, redis.call('SMEMBERS', shard .. ':ledger:crowded'), now)
end

local function reply(outcome, detail, woken)
  local answer = {outcome, detail}
  for _, cid in ipairs(woken) do answer[#answer + 1] = cid end
  return answer
end

-- deck_budget_reserve: reserve an amount for a conversation. If funds are short, it is woken when there are enough.
-- ARGV cid, worker, token, amount, sum of its log, account, parent account …
-- returns {'reserved', '', woken …} {'exhausted', account, woken …} {'fenced', '', woken …}
local function reserve(keys, args)
  local shard, cid, worker, token, amount, now = keys[1], args[1], args[2], args[3], tonumber(args[4]), store.now_ms(keys[1])
  local accounts = accounts_from(args, 6)
  begin_again(shard, cid, accounts[1], tonumber(token))
  enroll(shard, accounts)
  charge(shard, cid, accounts[1], tonumber(token), tonumber(args[5]))
  local woken = sweep(shard, now)
  local held = reserved_for(shard, cid, 'held')
  if held then
    local is_own = held.worker == '-' or held.token == tonumber(token)
    return reply(is_own and 'reserved' or 'fenced', '', woken)
  end
  local chain = chain_of(shard, accounts[1])
  local since = waits_since(shard, chain, cid)
  for _, account in ipairs(chain) do
    if not may_spend(shard, account, cid, amount, since, now) then
      stop_waiting(shard, chain, cid)
      stand(shard, account, cid, amount, since or fair_queue.place_at(budget(shard, account) .. ':waiting', now))
      return reply('exhausted', account, extend(woken, wake(shard, chain, now)))
    end
  end
  stop_waiting(shard, chain, cid)
  add(shard, chain, 'reserved', amount)
  redis.call('HSET', shard .. ':ledger:held', cid, table.concat({args[4], worker, token, accounts[1]}, ' '))
  return reply('reserved', '', extend(woken, wake(shard, chain, now)))
end

-- deck_budget_settle: charge the total of the log, and end the reservation.
-- ARGV cid, token, outcome, sum of its log, account, parent …
--   outcome 'done', or 'lost': the call may be billed and brought no reply
-- returns {'settled', '', woken …}
local function settle(keys, args)
  local shard, cid, token, now = keys[1], args[1], tonumber(args[2]), store.now_ms(keys[1])
  local accounts = accounts_from(args, 5)
  enroll(shard, accounts)
  local chain = chain_of(shard, accounts[1])
  charge(shard, cid, accounts[1], token, tonumber(args[4]))
  local held = reserved_for(shard, cid, 'held')
  if held and (held.worker == '-' or held.token == token) then
    if args[3] == 'lost' then
      lose(shard, cid, held)
      redis.call('HDEL', shard .. ':ledger:lost', cid)
    else
      give_back(shard, cid, held)
    end
  end
  drop_deleted(shard, accounts[1])
  local woken = sweep(shard, now)
  return reply('settled', '', extend(woken, wake(shard, chain, now)))
end

-- deck_budget_withdraw: remove a conversation from the queue of its budget.  ARGV cid, account
-- returns {'withdrawn', '', woken …}
local function withdraw(keys, args)
  local chain = chain_of(keys[1], args[2])
  stop_waiting(keys[1], chain, args[1])
  return reply('withdrawn', '', wake(keys[1], chain, store.now_ms(keys[1])))
end

-- deck_budget_sweep: move the reservations of dead workers to `lost`, and keys of another type away.
-- ARGV account …: further accounts whose keys are checked.  returns {'swept', '', woken …}
local function sweep_now(keys, args)
  for name, kind in pairs({held = 'hash', lost = 'hash', crowded = 'set', swept = 'string'}) do
    store.is_there(keys[1], keys[1] .. ':ledger:' .. name, kind)
  end
  store.is_there(keys[1], keys[1] .. ':budgets', 'set')
  for _, account in ipairs(args) do
    for name, kind in pairs({[''] = 'hash', [':children'] = 'set', [':waiting'] = 'zset', [':wanted'] = 'hash'}) do
      store.is_there(keys[1], budget(keys[1], account) .. name, kind)
    end
  end
  return reply('swept', '', sweep(keys[1], store.now_ms(keys[1])))
end

-- deck_budget_limit: set a limit, or change it by an amount.
-- ARGV key of this change, 'set', 'add' or 'from <limit>', amount or '' for no limit, account, parent …
--      'from <limit>': set it if this is the current limit; 'from ': if there is none
-- returns {'changed', limit or '', woken …} {'other', limit or ''}
local function change_limit(keys, args)
  local shard, accounts = keys[1], accounts_from(args, 4)
  local account, limits = accounts[1], shard .. ':limits'
  store.is_there(shard, limits, 'hash')
  enroll(shard, accounts)
  local key, changes = budget(shard, account), 'change ' .. account
  local known = store.get(limits, changes) or store.get(key, 'change') or ''
  if not string.find(' ' .. known .. ' ', ' ' .. args[1] .. ' ', 1, true) then
    local limit = limit_of(shard, account) or ''
    if string.sub(args[2], 1, 5) == 'from ' and string.sub(args[2], 6) ~= limit then return reply('other', limit, {}) end
    known = string.sub(args[1] .. ' ' .. known, 1, CHANGES_CHARS)
    if args[3] == '' then
      redis.call('HDEL', limits, account, changes)
      redis.call('HDEL', key, 'limit')
      redis.call('HSET', key, 'change', known)
    else
      redis.call('HSET', limits, changes, known)
      if args[2] ~= 'add' then redis.call('HSET', limits, account, args[3])
      else
        redis.call('HSETNX', limits, account, limit == '' and 0 or limit)
        redis.call('HINCRBY', limits, account, args[3])
      end
      redis.call('HSET', key, 'limit', store.get(limits, account))
    end
  end
  local limit, chain = limit_of(shard, account) or '', chain_of(shard, account)
  local is_listed = limit ~= '' or not store.get(key, 'deleted')
  redis.call(is_listed and 'SADD' or 'SREM', shard .. ':budgets', account)
  if limit ~= '' then redis.call('PERSIST', key) end
  drop_deleted(shard, account)
  return reply('changed', limit, wake(shard, chain, store.now_ms(keys[1])))
end

-- deck_budget_forget: delete the account of a deleted conversation. Its spending stays in the accounts above. An account
-- with a limit is kept as long as it has one, and one with delegates or a call in flight until these have ended; a call in
-- a batch ends with the next sweep, because its reply has no receiver.  ARGV cid, account
-- returns {'forgotten'} {'kept'}
local function forget(keys, args)
  local shard, cid, account = keys[1], args[1], args[2]
  local key = budget(shard, account)
  local function is_kept()
    return limit_of(shard, account) or store.get(shard .. ':ledger:held', cid) or redis.call('SCARD', key .. ':children') > 0
  end
  local kept = store.attempt(shard, key, account, is_kept)
  local parent = store.attempt(shard, key, account, store.get, key, 'parent')
  local children = parent and budget(shard, parent) .. ':children'
  -- A kept delegate keeps its parent too; otherwise the accounts above could not be found when its call ends.
  local is_listed = kept and (limit_of(shard, account) or string.find(parent or '', '^conversation:'))
  if children and not is_listed then store.attempt(shard, children, account, redis.call, 'SREM', children, account) end
  if kept then
    redis.call('HSET', key, 'deleted', '1')
    return {'kept'}
  end
  if store.attempt(shard, key, account, store.get, key, 'deleted') then  -- the deletion is repeated
    store.attempt(shard, key, account, drop_deleted, shard, account)
    return {'forgotten'}
  end
  store.attempt(shard, shard .. ':ledger:lost', cid, redis.call, 'HDEL', shard .. ':ledger:lost', cid)
  redis.call('DEL', key, key .. ':children', key .. ':waiting', key .. ':wanted')
  if parent then store.attempt(shard, budget(shard, parent), parent, drop_deleted, shard, parent) end
  return {'forgotten'}
end

-- deck_budget_adopt: create the account of a restored conversation, whose spending the accounts above it already include.
-- ARGV sum of its log, account, parent account, spending of its delegates.  returns {'adopted'} {'known'}
local function adopt(keys, args)
  local shard, account, parent = keys[1], args[2], args[3]
  local key, children = budget(shard, account), budget(shard, parent) .. ':children'
  local own, deleted = unpack(redis.call('HMGET', key, 'own', 'deleted'))
  if own or deleted then
    if redis.call('HDEL', key, 'deleted') == 1 then redis.call('SADD', children, account) end
    redis.call('PERSIST', key)
    return {'known'}
  end
  -- An account without the sum of the log was created meanwhile to hold a limit.
  redis.call('HSET', key, 'own', args[1])
  redis.call('HSETNX', key, 'parent', parent)
  add(shard, {account}, 'spent', tonumber(args[1]) + (tonumber(args[4]) or 0))
  redis.call('SADD', children, account)
  return {'adopted'}
end

redis.register_function('deck_budget_reserve', reserve)
redis.register_function('deck_budget_settle', settle)
redis.register_function('deck_budget_withdraw', withdraw)
redis.register_function('deck_budget_sweep', sweep_now)
redis.register_function('deck_budget_limit', change_limit)
redis.register_function('deck_budget_forget', forget)
redis.register_function('deck_budget_adopt', adopt)
