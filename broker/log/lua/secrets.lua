-- Secrets: check that a writer knows every value that it has to mask.
-- Keys:  conversation base  :secrets  hash   :masked  set  every value, encrypted   :secrets_of  string  the lender

local secrets = {}

-- Whether a writer knows every value that it has to mask. Values are only added, so their number is enough; the sample
-- shows that they belong to this conversation and not to a deleted one with the same id, because each is encrypted with its
-- own nonce. If a conversation borrows secrets, they may be in another slot, and its writers look them up.
function secrets.are_known(base, count, sample)
  local masked, lender = base .. ':masked', base .. ':secrets_of'
  if count == 0 then return redis.call('EXISTS', masked, lender) == 0 end
  return redis.call('SCARD', masked) == count and redis.call('SISMEMBER', masked, sample or '') == 1
    and redis.call('EXISTS', lender) == 0
end

-- The stored secrets: {current values by name, every value, the lender or ''}; {} if there are none.
function secrets.read(base)
  local masked, lender = base .. ':masked', base .. ':secrets_of'
  if redis.call('EXISTS', masked, lender) == 0 then return {} end
  return {redis.call('HGETALL', base .. ':secrets'), redis.call('SMEMBERS', masked), redis.call('GET', lender) or ''}
end

return secrets
