package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/identity/enroll"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// An exposeRun is "culvert expose" that runs.
type exposeRun struct {
	out, errors *syncBuffer
	dir         string // of the credentials
	stop        context.CancelFunc
	done        chan struct{}
	code        int // once done is closed
}

// expose runs the command of the guide with the credentials of an id, by the gateways at some
// addresses.
func (w *reverseWorld) expose(t *testing.T, id string, via []string, more ...string) *exposeRun {
	t.Helper()
	return w.exposeAs(t, w.issue(t, id), via, more...)
}

func (w *reverseWorld) exposeAs(t *testing.T, pair *testca.Pair, via []string, more ...string) *exposeRun {
	t.Helper()
	guide, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "guides", "reverse.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(guide), "```sh\nculvert ")
	line, _, ended := strings.Cut(rest, "\n```")
	if !ok || !ended {
		t.Fatal("the guide has no command")
	}
	dir := t.TempDir()
	for name, content := range map[string][]byte{"edge.crt": pair.CertPEM, "edge.key": pair.KeyPEM, "ca.pem": w.ca.CertPEM} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	line = strings.Replace(line, "127.0.0.1:8443", w.service.Addr().String(), 1)
	line = strings.Replace(line, "--via gw1.example", "--server-name gw1.example --via "+strings.Join(via, " --via "), 1)
	for _, name := range []string{"edge.crt", "edge.key", "ca.pem"} {
		line = strings.Replace(line, " "+name, " "+filepath.Join(dir, name), 1)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	r := &exposeRun{dir: dir, out: &syncBuffer{}, errors: &syncBuffer{}, stop: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		r.code = Main(ctx, append(strings.Fields(line), more...), r.out, r.errors)
	}()
	t.Cleanup(func() {
		cancel()
		<-r.done
		if t.Failed() {
			t.Logf("culvert expose printed:\n%s%s", r.out, r.errors)
		}
	})
	return r
}

// says waits until the command has printed text.
func (r *exposeRun) says(t *testing.T, text string) {
	t.Helper()
	testnet.Eventually(t, patience, func() bool { return strings.Contains(r.out.String(), text) }, "culvert expose prints %q", text)
}

// ends waits until the command has ended, with exit code 1 and text as the error.
func (r *exposeRun) ends(t *testing.T, text string) {
	t.Helper()
	testnet.Eventually(t, patience, func() bool {
		select {
		case <-r.done:
			return true
		default:
			return false
		}
	}, "culvert expose ends")
	if r.code != exitFailed || !strings.Contains(r.errors.String(), text) {
		t.Errorf("exit code %d with %q, want %d with %q", r.code, r.errors, exitFailed, text)
	}
}

const helloClient = "hello spiffe://corp.example/ns/web/sa/client\n"

// The first recipe of the guide: one command, and the service is reached by name with the
// client's certificate from end to end. What refuses the name is said with what to do.
func TestExposeGuide(t *testing.T) {
	w := newReverseWorld(t)
	gateway := w.gateway.addrs[0]
	one := w.expose(t, "spiffe://corp.example/ns/edge/sa/one", []string{gateway}, "-o", "json")
	one.says(t, `"event":"session"`)
	if got, err := w.ask(t, "cam.edge.example"); err != nil || got != helloClient {
		t.Fatalf("got %q and %v, want %q", got, err, helloClient)
	}

	twin := w.expose(t, "spiffe://corp.example/ns/edge/sa/one", []string{gateway})
	twin.says(t, "cam.edge.example is registered\n  another connector with the same identity has it, too")
	twin.stop()
	<-twin.done

	taken := w.expose(t, "spiffe://corp.example/ns/edge/sa/two", []string{gateway})
	taken.ends(t, "it belongs to another owner")
	if !strings.Contains(taken.errors.String(), "take another name") {
		t.Errorf("nothing says what to do about a name of another owner: %q", taken.errors)
	}
	denied := w.expose(t, "spiffe://corp.example/ns/web/sa/three", []string{gateway})
	denied.ends(t, "needs a policy with verb: register for cam.edge.example and spiffe://corp.example/ns/web/sa/three")

	stranger, err := newTestCA(t, "other.example").Issue(testca.Options{SPIFFEID: "spiffe://other.example/me"})
	if err != nil {
		t.Fatal(err)
	}
	w.exposeAs(t, stranger, []string{gateway}).ends(t, "has to trust the CA that signed --cert")
	unknown := *w
	unknown.ca = newTestCA(t, "other.example")
	unknown.exposeAs(t, w.client, []string{gateway}).ends(t, "with --ca FILE")
	w.expose(t, "spiffe://corp.example/ns/edge/sa/one", []string{gateway}, "--server-name", "gw2.example").ends(t, "with --server-name NAME")

	// One that is only away is tried again, and what may be wrong is said.
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	away := w.expose(t, "spiffe://corp.example/ns/edge/sa/four", []string{closed.Addr().String()})
	away.says(t, "correct the address and port of --via")

	one.stop()
	<-one.done
	if one.code != exitOK {
		t.Errorf("an interrupt: exit code %d, want %d", one.code, exitOK)
	}
	var events []string
	for line := range strings.Lines(one.out.String()) {
		var e exposeEvent
		if err := json.Unmarshal([]byte(line), &e); err != nil || e.Name != "cam.edge.example" || e.Time.IsZero() {
			t.Errorf("the event %q: %v", line, err)
		}
		if e.Event != "progress" {
			events = append(events, e.Event)
		}
	}
	if got := strings.Join(events, " "); got != "starting session draining stopped" {
		t.Errorf("the events are %q", got)
	}
}

// A gateway that is away is tried again until it is there.
func TestExposeWaitsForTheGateway(t *testing.T) {
	w := newReverseWorld(t)
	gone := testnet.ClosedPort(t)
	waiting := w.expose(t, "spiffe://corp.example/ns/edge/sa/one", []string{gone})
	waiting.says(t, "trying again")
	both := w.expose(t, "spiffe://corp.example/ns/web/sa/three", []string{gone, w.gateway.addrs[0]})
	both.says(t, "needs a policy with verb: register")
	both.says(t, "trying again")
	for _, r := range []*exposeRun{waiting, both} {
		select {
		case <-r.done:
			t.Errorf("a gateway that is away ended the command: %d %s", r.code, r.errors)
		default:
		}
	}
}

// --allow lets the callers connect that it names, by what the gateway knows of them.
func TestExposeAllow(t *testing.T) {
	w := newReverseWorld(t)
	one := w.expose(t, "spiffe://corp.example/ns/edge/sa/one", []string{w.gateway.addrs[0]}, "--allow", "spiffe://corp.example/ns/web/sa/client")
	one.says(t, "cam.edge.example is registered")
	for id, want := range map[string]int{"spiffe://corp.example/ns/web/sa/client": http.StatusOK, "spiffe://corp.example/ns/web/sa/other": http.StatusForbidden} {
		if got := w.connect(t, id); got != want {
			t.Errorf("%s: CONNECT is answered %d, want %d", id, got, want)
		}
	}
	if got, err := w.ask(t, "cam.edge.example"); err == nil {
		t.Errorf("a caller whom the gateway does not know: got %q, want a refusal", got)
	}
}

// connect asks the gateway for the name by CONNECT, as id, and returns the status.
func (w *reverseWorld) connect(t *testing.T, id string) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	d := tls.Dialer{Config: &tls.Config{ServerName: "gw1.example", RootCAs: w.ca.Pool(), Certificates: []tls.Certificate{w.issue(t, id).TLS}}}
	c, err := d.DialContext(ctx, "tcp", w.gateway.addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := fmt.Fprint(c, "CONNECT cam.edge.example:443 HTTP/1.1\r\nHost: cam.edge.example:443\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatal(err)
	}
	_ = answer.Body.Close()
	return answer.StatusCode
}

// With two gateways, one of which dies without a word while clients come and go, whoever
// asks from then on is served by the other.
func TestExposeOutlivesAGateway(t *testing.T) {
	w := newReverseWorld(t)
	second := w.startGateway(t)
	path := testnet.NewRecorder(t, w.gateway.addrs[0]) // which the first gateway dies with
	at := []string{path.Addr(), second.addrs[0]}
	one := w.expose(t, "spiffe://corp.example/ns/edge/sa/one", at)
	for _, a := range at {
		one.says(t, a+": cam.edge.example is registered")
	}
	var (
		killed = make(chan struct{})
		before sync.WaitGroup // each client has been served by the first gateway
		all    sync.WaitGroup
	)
	const clients, each = 4, 20
	for range clients {
		before.Add(1)
		all.Go(func() {
			served := 0
			first := sync.OnceFunc(before.Done)
			defer first()
			for served < each {
				dead := false
				select {
				case <-killed:
					dead = true
				default:
				}
				var got string
				var err error
				for _, a := range at {
					if got, err = w.askAt(t, a, "cam.edge.example"); err == nil {
						break
					}
				}
				switch {
				case err == nil && got == helloClient:
					first()
					if dead {
						served++
					}
				case dead:
					t.Errorf("after the first gateway was killed: got %q and %v", got, err)
					return
				}
			}
		})
	}
	before.Wait()
	path.Close()
	close(killed)
	all.Wait()
	one.says(t, at[0]+": no session")
	select {
	case <-one.done:
		t.Errorf("the command has ended with %d", one.code)
	default:
	}
}

// What to do about a gateway that can't be reached.
func TestExposeHints(t *testing.T) {
	for _, c := range []struct {
		protocol string
		err      error
		want     string
	}{
		{"connect", &net.DNSError{Err: "no such host", IsNotFound: true}, "correct --via, or have DNS answer it"},
		{"connect", &net.DNSError{Err: "i/o timeout", IsTimeout: true}, "the DNS server of this machine"},
		{"connect", syscall.ECONNREFUSED, "start the gateway"},
		{"connect", os.ErrDeadlineExceeded, "let TCP to that port through"},
		{"connect-h3", os.ErrDeadlineExceeded, "--protocol connect-h2 uses TCP"},
		{"connect", tunnel.Refusef(tunnel.DialFailed, "proxy: %w", tunnel.Refusef(tunnel.Prohibited, "127.0.0.1:443 is loopback")), "write the address in place of the name, with --server-name"},
		{"websocket", tunnel.Refusef(tunnel.BadMethod, "status 405"), "does not take websocket there"},
		{"connect", io.EOF, ""},
	} {
		x := &exposing{o: &exposeOptions{protocol: c.protocol}}
		if got := x.sessionHint(fmt.Errorf("asking: %w", c.err)); !strings.Contains(got, c.want) || c.want == "" && got != "" {
			t.Errorf("%s, %v: %q, want %q", c.protocol, c.err, got, c.want)
		}
	}
}

// Alerts of TLS differ in what to do about them.
func TestExposeHintsOfAlerts(t *testing.T) {
	for _, c := range []struct {
		alert string
		o     exposeOptions
		want  string
	}{
		{"tls: no application protocol", exposeOptions{protocol: "connect-h2", gatewayAccess: gatewayAccess{credentialFiles: credentialFiles{cert: "me.crt"}}}, "does not take connect-h2 there"},
		{"tls: certificate required", exposeOptions{gatewayAccess: gatewayAccess{credentialFiles: credentialFiles{token: "token"}}}, "give one with --cert and --key"},
		{"tls: bad certificate", exposeOptions{gatewayAccess: gatewayAccess{credentialFiles: credentialFiles{cert: "me.crt"}}}, "has to trust the CA that signed --cert"},
		{"tls: bad certificate", exposeOptions{gatewayAccess: gatewayAccess{joined: &enroll.Membership{}}}, "culvert join --replace"},
		{"tls: unrecognized name", exposeOptions{gatewayAccess: gatewayAccess{credentialFiles: credentialFiles{cert: "me.crt"}}}, "--server-name NAME"},
	} {
		x := &exposing{o: &c.o}
		if got := x.sessionHint(&net.OpError{Op: "remote error", Err: errors.New(c.alert)}); !strings.Contains(got, c.want) {
			t.Errorf("%s, %+v: %q, want %q", c.alert, c.o, got, c.want)
		}
	}
}

// The end of a long error, which says why, is shown.
func TestExposeShowsWhyRequestsFail(t *testing.T) {
	var out strings.Builder
	x := newExposing(&out, &exposeOptions{name: "cam.edge.example", to: "127.0.0.1:9999"})
	for _, fill := range []int{60, 600} {
		x.failed = time.Time{}
		x.observe(&tunnel.Outcome{Reason: tunnel.DialFailed, Err: errors.New("service " + strings.Repeat("n", fill) + ": dial 127.0.0.1:9999: connect: connection refused")})
		out.Reset()
		x.progress(nil, 0, 0)
		if got := out.String(); !strings.Contains(got, "dial 127.0.0.1:9999: connect: connection refused\n  does the service listen at 127.0.0.1:9999?\n") || len(got) > 500 {
			t.Errorf("got %q", got)
		}
	}
}

// The line that is written again and again is not wrapped where the terminal is narrow: what it
// would leave behind stays.
func TestExposeProgressIsOneLine(t *testing.T) {
	var out strings.Builder
	x := newExposing(&cleanWriter{w: &out, color: true}, &exposeOptions{name: "cam.edge.example", to: "127.0.0.1:9999"})
	x.progress(nil, 0, 0)
	if got, want := out.String(), "\r\x1b[K\x1b[?7l0 of 0 sessions, 0 streams, 0 B to the service, 0 B from it\x1b[?7h"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A certificate that is renewed on disk is taken up while the command runs.
func TestExposeTakesUpARenewedCertificate(t *testing.T) {
	w := newReverseWorld(t)
	const id = "spiffe://corp.example/ns/edge/sa/one"
	r := w.expose(t, id, []string{w.gateway.addrs[0]}, "--log-level", "info")
	r.says(t, "cam.edge.example is registered")
	pair := w.issue(t, id)
	for name, content := range map[string][]byte{"edge.crt": pair.CertPEM, "edge.key": pair.KeyPEM} {
		if err := os.WriteFile(filepath.Join(r.dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	testnet.Eventually(t, patience, func() bool { return strings.Contains(r.errors.String(), `msg="credentials changed"`) }, "the certificate is taken up")
}

// What is said of a clock is said once, and not again with each second.
func TestExposeSaysAHintOnce(t *testing.T) {
	var out strings.Builder
	x := newExposing(&out, &exposeOptions{name: "cam.edge.example", gatewayAccess: gatewayAccess{credentialFiles: credentialFiles{cert: "me.crt"}}})
	x.connected = true
	now := time.Now()
	for i := range 3 {
		at := now.Add(time.Duration(i) * time.Hour)
		x.own = func() []identity.Entry {
			return []identity.Entry{{Ends: []identity.End{{Kind: identity.KindKey, Of: "spiffe://corp.example/edge", NotBefore: at.Add(-48 * time.Hour), NotAfter: at.Add(-24 * time.Hour)}}}}
		}
		err := &net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")}
		_ = x.look([]reverse.SessionState{{Gateway: "gw1.example:443", Err: err, Error: err.Error()}})
	}
	if n := strings.Count(out.String(), "the clock of this machine says"); n != 1 {
		t.Errorf("it is said %d times, want once:\n%s", n, out.String())
	}
}

// What to do about a service that can't be reached depends on why.
func TestExposeHintsOfRequests(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{tunnel.Refusef(tunnel.DialFailed, "none of 1: %w", errors.Join(tunnel.Refusef(tunnel.Prohibited, "127.0.0.1:8443 is loopback"))), "--to 127.0.0.1:8443"},
		{tunnel.Refusef(tunnel.LookupError, "lookup of db.lan"), "have the DNS server of this machine answer it"},
		{tunnel.Refusef(tunnel.DialFailed, "connection refused"), "does the service listen at db.lan:8443?"},
	} {
		x := newExposing(io.Discard, &exposeOptions{name: "cam.edge.example", to: "db.lan:8443"})
		x.observe(&tunnel.Outcome{Reason: tunnel.ReasonOf(c.err), Err: c.err})
		if !strings.Contains(x.last.Hint, c.want) {
			t.Errorf("%v: %q, want %q", c.err, x.last.Hint, c.want)
		}
	}
}

// A gateway that begins again with its state knows whose a name is.
func TestNamesOfConnectorsOutliveTheGateway(t *testing.T) {
	w := newReverseWorld(t)
	state := t.TempDir()
	kept := `{"version": 1, "names": [{"name": "cam.edge.example", "owner": "spiffe://corp.example/ns/edge/sa/two", "left": 600}]}`
	if err := os.WriteFile(filepath.Join(state, "connectors.json"), []byte(kept), 0o600); err != nil {
		t.Fatal(err)
	}
	w.gatewayRecipe += fmt.Sprintf("site: {key: gw, trust: corp.example, state: %q}\n", state)
	again := w.startGateway(t).addrs
	w.expose(t, "spiffe://corp.example/ns/edge/sa/one", again).ends(t, "it belongs to another owner")
	w.expose(t, "spiffe://corp.example/ns/edge/sa/two", again).says(t, "cam.edge.example is registered")
}
