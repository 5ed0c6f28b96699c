package inbound

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/bcrypt"

	"culvert.dev/connect"
	"culvert.dev/identity/jwt"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

func hashOf(t testing.TB, password string, cost int) registry.Secret {
	t.Helper()
	h, err := bcrypt.GenerateFromPassword([]byte(password), cost)
	if err != nil {
		t.Fatal(err)
	}
	return registry.Secret(h)
}

func verifierOf(t testing.TB, a *registry.Auth) *verifier {
	t.Helper()
	v, err := newVerifier(&Builder{checks: newCheckQueue(1), Tokens: new(jwt.Tokens)})
	if err == nil {
		_, err = v.use(a)
	}
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func basic(from string, user, password string) connect.Credentials {
	value := strings.TrimPrefix(connect.BasicCredentials(user, password), "Basic ")
	return connect.Credentials{Scheme: "basic", Value: value, From: netip.MustParseAddr(from)}
}

func bearer(token string) connect.Credentials {
	return connect.Credentials{Scheme: "bearer", Value: token, From: netip.MustParseAddr("192.0.2.1")}
}

// What a reload takes away is refused at once, also where it was remembered, and
// what it adds is accepted.
func TestCredentialsAreReloaded(t *testing.T) {
	alice, bob := hashOf(t, "a-secret", bcrypt.MinCost), hashOf(t, "b-secret", bcrypt.MinCost)
	one, two := registry.TokenDigest(sha256.Sum256([]byte("t-one"))), registry.TokenDigest(sha256.Sum256([]byte("t-two")))
	v := verifierOf(t, &registry.Auth{Users: map[string]registry.Secret{"alice": alice, "bob": bob}, Tokens: map[registry.TokenDigest]string{one: "one"}})
	wants := func(when string, c connect.Credentials, want bool) {
		t.Helper()
		if _, err := v.Authenticate(t.Context(), c); (err == nil) != want {
			t.Errorf("%s: got %v, want it accepted: %v", when, err, want)
		}
	}
	for range 2 { // the second time they are remembered
		wants("before", basic("192.0.2.1", "alice", "a-secret"), true)
		wants("before", basic("192.0.2.1", "bob", "b-secret"), true)
		wants("before", bearer("t-one"), true)
		wants("before", bearer("t-two"), false)
	}
	next := &registry.Auth{
		Users:  map[string]registry.Secret{"bob": hashOf(t, "another", bcrypt.MinCost), "carol": alice},
		Tokens: map[registry.TokenDigest]string{two: "two"},
	}
	use := func(a *registry.Auth, want credentialChange) {
		t.Helper()
		if got, err := v.use(a); err != nil || got != want {
			t.Errorf("got %+v and %v, want %+v", got, err, want)
		}
	}
	use(next, credentialChange{usersAdded: 1, usersRemoved: 1, usersChanged: 1, tokensAdded: 1, tokensRemoved: 1})
	wants("taken away", basic("192.0.2.1", "alice", "a-secret"), false)
	wants("with another password", basic("192.0.2.1", "bob", "b-secret"), false)
	wants("with another password", basic("192.0.2.1", "bob", "another"), true)
	wants("added", basic("192.0.2.1", "carol", "a-secret"), true)
	wants("taken away", bearer("t-one"), false)
	wants("added", bearer("t-two"), true)
	use(next, credentialChange{})
	if _, err := v.use(&registry.Auth{}); err == nil {
		t.Error("credentials of nobody are accepted")
	}
	wants("after credentials of nobody", bearer("t-two"), true)
	use(&registry.Auth{Tokens: next.Tokens}, credentialChange{usersRemoved: 2})
	if got := strings.Join(v.Challenges(), ", "); got != `Bearer realm="culvert"` {
		t.Errorf("the challenges are %q, want that of tokens alone", got)
	}
	wants("where there are tokens alone", basic("192.0.2.1", "bob", "another"), false)
}

// A wrong password takes as much work whatever the cost of the user's hash is,
// and whether there is such a user.
func TestPasswordsTakeTheSameTime(t *testing.T) {
	const low, high = bcrypt.MinCost, bcrypt.MinCost + 5
	users := map[string]registry.Secret{"low": hashOf(t, "a", low), "middle": hashOf(t, "a", low+2), "high": hashOf(t, "a", high)}
	for _, user := range []string{"low", "middle", "high", "nobody"} {
		work := 0
		right := compare(func(hash, password []byte) error {
			cost, err := bcrypt.Cost(hash)
			if err != nil {
				t.Error(err)
			}
			work += 1 << cost
			return bcrypt.CompareHashAndPassword(hash, password)
		}, users[user], "wrong", high)
		if right || work != 1<<high {
			t.Errorf("%s: right is %v, and it took %d, want %d as for the highest cost", user, right, work, 1<<high)
		}
	}
	if !compare(bcrypt.CompareHashAndPassword, users["low"], "a", high) {
		t.Error("a right password is wrong")
	}
	for cost := bcrypt.MinCost; cost <= 14; cost++ {
		if got, err := bcrypt.Cost(decoy(cost)); got != cost || err != nil {
			t.Errorf("the decoy of cost %d has %d, %v", cost, got, err)
		}
	}
	if err := bcrypt.CompareHashAndPassword(decoy(low), []byte("x")); err != bcrypt.ErrMismatchedHashAndPassword {
		t.Errorf("the decoy is no hash: %v", err)
	}
}

// Right passwords are remembered while they are used; of too many, the one that
// was not used for longest is forgotten.
func TestRightPasswordsAreRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := verifierOf(t, &registry.Auth{Users: map[string]registry.Secret{"alice": hashOf(t, "a", bcrypt.MinCost)}})
		sum := func(i int) [sha256.Size]byte { return sha256.Sum256(fmt.Append(nil, i)) }
		v.remember(sum(0), "h")
		for range 5 {
			time.Sleep(rememberFor - time.Second)
			if !v.remembers(sum(0), "h") {
				t.Fatal("forgotten while it is used")
			}
		}
		time.Sleep(rememberFor + time.Second)
		if v.remembers(sum(0), "h") || len(v.right) != 0 || v.order.Len() != 0 {
			t.Error("remembered for too long")
		}
		for i := range remembered {
			v.remember(sum(i), "h")
		}
		if !v.remembers(sum(0), "h") {
			t.Error("forgotten too early")
		}
		for i := range 10 {
			v.remember(sum(remembered+i), "h")
		}
		if !v.remembers(sum(0), "h") || v.remembers(sum(1), "h") || !v.remembers(sum(remembered), "h") || v.remembers(sum(remembered), "another") {
			t.Error("want the ones that were not used for longest forgotten, and those of another hash")
		}
		if len(v.right) > remembered || len(v.right) != v.order.Len() {
			t.Errorf("%d are remembered, %d in order", len(v.right), v.order.Len())
		}
	})
}

// A client that has all the checks it can waits behind itself: another one has
// its turn next. There are never more at once than there may be, and one of each
// client at most.
func TestCheckQueueIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const slow = 100 * time.Millisecond // of a check
		q := newCheckQueue(2)
		var running, most, refused atomic.Int32
		var of sync.Map
		check := func(from netip.Addr) func() {
			return func() {
				if _, twice := of.LoadOrStore(from, true); twice {
					t.Errorf("two checks of %s at once", from)
				}
				most.Store(max(most.Load(), running.Add(1)))
				time.Sleep(slow)
				running.Add(-1)
				of.Delete(from)
			}
		}
		var all sync.WaitGroup
		attack := func(from string, n int) {
			addr := netip.MustParseAddr(from)
			for range n {
				all.Go(func() {
					switch err := q.run(t.Context(), addr, check(addr)); {
					case tunnel.ReasonOf(err) == tunnel.Overload:
						refused.Add(1)
					case err != nil:
						t.Error(err)
					}
				})
			}
			synctest.Wait()
		}
		attack("192.0.2.1", 180)
		attack("2001:db8::1", 20)
		for i, honest := range []string{"192.0.2.2", "192.0.2.3", "2001:db8:1::1"} {
			start := time.Now()
			addr := netip.MustParseAddr(honest)
			if err := q.run(t.Context(), addr, check(addr)); err != nil {
				t.Errorf("%s: %v", honest, err)
			}
			if took := time.Since(start); took > 3*slow {
				t.Errorf("client %d waits for %v, want a turn after those that run", i, took)
			}
		}
		all.Wait()
		if most.Load() != 2 {
			t.Errorf("%d checks at once, want 2", most.Load())
		}
		if refused.Load() == 0 {
			t.Error("none was refused")
		}
		if q.waiting != 0 || len(q.clients) != 0 || len(q.next) != 0 || q.free != 2 {
			t.Errorf("left over: %d waiting, %d clients, %d to be next, %d free", q.waiting, len(q.clients), len(q.next), q.free)
		}
	})
}

// Addresses of one IPv6 /64 are one client.
func TestCheckQueueClients(t *testing.T) {
	for _, tt := range []struct{ addr, want string }{
		{"192.0.2.1", "192.0.2.1/32"}, {"::ffff:192.0.2.1", "192.0.2.1/32"}, {"2001:db8::1:2:3:4", "2001:db8::/64"}, {"fe80::1%eth0", "fe80::/64"},
	} {
		if got := clientOf(netip.MustParseAddr(tt.addr)).String(); got != tt.want {
			t.Errorf("%s is of client %s, want %s", tt.addr, got, tt.want)
		}
	}
	if got := clientOf(netip.Addr{}); got.IsValid() {
		t.Errorf("no address is of client %s", got)
	}
}

// Who waits may leave, and is not waited for; who waits for too long hears so.
func TestCheckQueueIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newCheckQueue(1)
		first, second := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
		block := make(chan struct{})
		var all sync.WaitGroup
		all.Go(func() { _ = q.run(t.Context(), first, func() { <-block }) })
		synctest.Wait()
		ctx, cancel := context.WithCancel(t.Context())
		all.Go(func() {
			if err := q.run(ctx, second, func() { t.Error("checked for a client that has left") }); tunnel.ReasonOf(err) != tunnel.Gone {
				t.Errorf("got %v, want %s", err, tunnel.Gone)
			}
		})
		all.Go(func() {
			if err := q.run(t.Context(), first, func() { t.Error("checked too late") }); tunnel.ReasonOf(err) != tunnel.Overload {
				t.Errorf("got %v, want %s", err, tunnel.Overload)
			}
		})
		synctest.Wait()
		cancel()
		synctest.Wait()
		time.Sleep(maxWait + time.Second)
		close(block)
		all.Wait()
		if q.waiting != 0 || len(q.clients) != 0 || len(q.next) != 0 || q.free != 1 {
			t.Errorf("left over: %+v", q)
		}
	})
}

// Of 64 clients that wait, each with one check, another one hears no at once.
func TestCheckQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := newCheckQueue(1)
		block := make(chan struct{})
		var all sync.WaitGroup
		for i := range maxWaiting + 1 {
			all.Go(func() {
				if err := q.run(t.Context(), netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), func() { <-block }); err != nil {
					t.Errorf("client %d: %v", i, err)
				}
			})
		}
		synctest.Wait()
		start := time.Now()
		err := q.run(t.Context(), netip.MustParseAddr("192.0.2.1"), func() { t.Error("checked") })
		if tunnel.ReasonOf(err) != tunnel.Overload || time.Since(start) != 0 {
			t.Errorf("got %v after %v, want %s at once", err, time.Since(start), tunnel.Overload)
		}
		close(block)
		all.Wait()
		if len(q.clients) != 0 {
			t.Errorf("%d clients are left over", len(q.clients))
		}
	})
}
