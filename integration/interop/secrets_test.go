//go:build linux

package interop

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"culvert.dev/internal/invitation"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// secrets are what must not be seen, by what they are.
type secrets map[string]string

// key adds a private key of a file, as PEM and as its bytes are written elsewhere.
func (s secrets) key(t *testing.T, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	for b, rest := pem.Decode(text); b != nil; b, rest = pem.Decode(rest) {
		if !strings.HasSuffix(b.Type, "PRIVATE KEY") {
			continue
		}
		// The middle has bytes of the key itself, whatever the encoding begins with.
		middle := b.Bytes[len(b.Bytes)/2:][:24]
		name := "the key " + filepath.Base(path)
		lines := strings.Split(strings.TrimSpace(string(pem.EncodeToMemory(b))), "\n")
		s[name+", PEM"] = lines[1]
		s[name+", bytes"] = string(middle)
		s[name+", hex"] = hex.EncodeToString(middle)
		for i := range 3 {
			s[fmt.Sprintf("%s, base64 %d", name, i)] = base64.RawStdEncoding.EncodeToString(middle[i : i+15])
		}
	}
}

// seenIn returns which secrets a text has.
func (s secrets) seenIn(text []byte) (all []string) {
	for what, secret := range s {
		if bytes.Contains(text, []byte(secret)) {
			all = append(all, what)
		}
	}
	return all
}

// A procWatch looks at the arguments and the environment of all processes again and again.
type procWatch struct {
	mu      sync.Mutex
	secrets secrets
	found   map[string]bool
	looked  map[string]bool // programs
}

// watchProcesses begins to look for secrets. The end of the test ends it, with what it has found.
func watchProcesses(t *testing.T, s secrets) *procWatch {
	t.Helper()
	w := &procWatch{secrets: s, found: map[string]bool{}, looked: map[string]bool{}}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			w.look()
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		for what := range w.found {
			t.Error(what)
		}
	})
	return w
}

func (w *procWatch) look() {
	all, _ := filepath.Glob("/proc/[0-9]*")
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, dir := range all {
		line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			continue
		}
		args := strings.Split(string(line), "\x00")
		if len(args) > 1 {
			w.looked[filepath.Base(args[0])+" "+args[1]] = true
		}
		environ, _ := os.ReadFile(filepath.Join(dir, "environ"))
		for where, text := range map[string][]byte{"arguments": line, "environment": environ} {
			for _, what := range w.secrets.seenIn(text) {
				w.found[fmt.Sprintf("the %s of %q have %s", where, strings.Join(args, " "), what)] = true
			}
		}
	}
}

// add has w look for more.
func (w *procWatch) add(more secrets) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.Copy(w.secrets, more)
}

// saw waits until w has looked at a program.
func (w *procWatch) saw(t *testing.T, program string) {
	t.Helper()
	testnet.Eventually(t, patience, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.looked[program]
	}, "%s is seen among the processes", program)
}

// No token, no private key and no password is in a log, an error, a status, an argument or an
// environment of any process, at the level debug: of the gateway, of a device that joins and exposes a
// service, and of an agent behind a corporate proxy whose password a command gives.
func TestSecretsStaySecret(t *testing.T) {
	t.Parallel()
	const (
		gwName    = "gw.example.test"
		proxyPass = "hunter2-of-the-proxy"
		userPass  = "wonderland-of-alice"
		wrongPass = "guessed-by-mallory"
	)
	w := newWorld(t)
	ca := w.authority
	issue(t, ca, w.dir, "gw", testca.Options{SPIFFEID: "spiffe://example.test/gw", DNSNames: []string{gwName, "localhost"}})
	userHash, err := bcrypt.GenerateFromPassword([]byte(userPass), bcrypt.MinCost)
	must(t, err)
	users := "alice:" + string(userHash) + "\n"
	w.write(t, "users", users)
	w.write(t, "alice.password", "alice:"+userPass+"\n")
	w.write(t, "proxy.password", proxyPass+"\n")
	all := secrets{"the password of the proxy": proxyPass, "the password of alice": userPass, "a wrong password": wrongPass, "the hash of alice's password": string(userHash)}
	for _, pair := range [][2]string{{"alice", userPass}, {"corp", proxyPass}, {"alice", wrongPass}} {
		all["Basic of "+pair[0]+" with "+pair[1]] = base64.StdEncoding.EncodeToString([]byte(pair[0] + ":" + pair[1]))
	}
	for _, key := range []string{"gw.key", "web.key", "svc.key", "ca.key"} {
		all.key(t, filepath.Join(w.dir, key))
	}
	watch := watchProcesses(t, maps.Clone(all))

	sitePort, userPort, admin := freePort(t), freePort(t), "127.0.0.1:"+freePort(t)
	far := startGateway(t, "--config", w.write(t, "far.yaml", fmt.Sprintf(`
cluster: far
listeners:
  - {address: "127.0.0.1:%[1]s", protocols: [sni], tls: {names: [localhost, %[2]s], key: gw, trust: example.test, clientCertificates: optional, protocols: [connect-h2]}}
  - {address: "127.0.0.1:%[3]s", tls: {key: gw, protocols: [connect-h2]}, auth: {usersFile: users}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {example.test: {caFile: ca.crt}}
enrollment: {gateway: "localhost:%[1]s", key: gw, trustDomain: example.test, certificateFile: ca.crt, keyFile: ca.key, state: enrollment}
site: {gateways: [{address: "localhost:%[1]s", transports: [connect-h2]}], key: gw, trust: example.test, state: site}
policies:
  - {name: devices, verb: register, action: allow, targets: {names: ["*.edge.test"]}, rules: [{sources: [{spiffe: ["spiffe://example.test/device/*"]}]}]}
services: [{name: %[4]s, ports: [443], endpoints: [%[5]q]}]
admin: %[6]s
adminControl: true
`, sitePort, gwName, userPort, svc, w.serveHTTPS(t, http.HandlerFunc(whoami)), admin)))

	var said []string // by commands that ended
	run := func(want int, args ...string) string {
		t.Helper()
		out, errs, code := command(t, "culvert", args...)
		if code != want {
			t.Errorf("culvert %v: exit code %d, want %d: %s%s", args, code, want, out, errs)
		}
		said = append(said, out+errs)
		return out
	}

	// The tokens, which are written once, to standard output.
	token, errs, code := command(t, "culvert", "invite", "--device", "cam-7", "--admin", admin)
	if code != 0 {
		t.Fatalf("culvert invite: %s", errs)
	}
	siteToken, errs, code := command(t, "culvert", "invite", "--zones", "*.west.test", "--admin", admin)
	if code != 0 {
		t.Fatalf("culvert invite: %s", errs)
	}
	tokens := secrets{}
	for what, text := range map[string]string{"the token of the device": token, "the token of the site": siteToken} {
		text = strings.TrimSpace(text)
		token, err := invitation.Parse(text, time.Now())
		must(t, err)
		secret := base64.StdEncoding.EncodeToString(token.Secret)
		body, err := base64.RawURLEncoding.DecodeString(text[len(token.Kind):])
		must(t, err)
		at := bytes.Index(body, []byte(secret))
		if at < 0 {
			t.Fatal("the token does not have its secret where it is looked for")
		}
		at = len(token.Kind) + (at+2)/3*4 // the text of what follows
		tokens[what], tokens[what+", in part"] = text, text[at:at+32]
		tokens[what+", bytes"], tokens[what+", hex"] = string(token.Secret), hex.EncodeToString(token.Secret)
		tokens[what+", base64"] = base64.RawStdEncoding.EncodeToString(token.Secret)
	}
	maps.Copy(all, tokens)
	watch.add(tokens)

	// The device reads the token while it is looked at.
	device := filepath.Join(w.dir, "device")
	join := start(t, "culvert", "join", "--state", device, "-")
	watch.saw(t, "culvert join")
	_, err = join.stdin.Write([]byte(token))
	must(t, err)
	must(t, join.stdin.Close())
	join.says(t, "joined as spiffe://example.test/device/cam-7")
	join.awaitEnd(t)
	deviceKey := secrets{}
	deviceKey.key(t, filepath.Join(device, "identity.pem"))
	if len(deviceKey) == 0 {
		t.Error("the device has no key")
	}
	maps.Copy(all, deviceKey)
	watch.add(deviceKey)
	again := exchanged(t, token, "join", "--state", device+"2", "-")
	damaged := strings.TrimSpace(token)
	damaged = damaged[:len(damaged)-4] + "AAAA"
	wrong := exchanged(t, damaged, "join", "--state", device+"2", "-")
	said = append(said, again, wrong)
	run(2, "join", "--state", device+"2", tokens["the token of the site"][:50])

	expose := start(t, "culvert", "expose", "cam.edge.test", "--to", strings.TrimPrefix(w.serveHTTPS(t, http.HandlerFunc(whoami)), "https://"), "--state", device, "--log-level", "debug", "-o", "json")
	expose.says(t, `"event":"session"`)

	// An agent behind a proxy, with a password at each.
	proxyPort := freePort(t)
	_, _ = w.squid(t, proxyPort, userPort, "corp", proxyPass, "127.0.0.1 "+gwName+"\n")
	agents := map[string]string{}
	for name, password := range map[string]string{"good": "alice.password", "bad": "wrong.password"} {
		w.write(t, "wrong.password", "alice:"+wrongPass+"\n")
		agents[name] = "127.0.0.1:" + freePort(t)
		path := w.write(t, name+".yaml", fmt.Sprintf(`
agent: {gateway: "%s:%s", transports: [connect-h2], caFile: ca.crt, userFile: %s, proxy: %q}
upstreamProxy: {url: "http://127.0.0.1:%s", user: corp, passwordCommand: [sh, -c, "sleep 0.3; cat %s/proxy.password"]}
`, gwName, userPort, password, agents[name], proxyPort, w.dir))
		agent := start(t, "culvert", "agent", "--config", path, "--log-level", "debug")
		agent.listens(t, agents[name])
		out, errs, code := command(t, "curl", "-sS", "--proxy", "http://"+agents[name], "--cacert", w.ca, "--cert", w.cert, "--key", w.key, "https://"+svc+"/")
		if ok := code == 0 && strings.HasPrefix(out, "you are "+clientID); ok != (name == "good") {
			t.Errorf("by the agent with the %s password: exit code %d, %q, %s; %s", name, code, out, errs, agent.output())
		}
		said = append(said, out+errs)
		// culvert connect by the file of the agent asks the gateway itself.
		connect := withInput(t, "", "connect", "--config", path, svc, "443")
		out, errs, _ = runCmd(t, connect)
		said = append(said, out+errs)
		t.Cleanup(func() {
			if seen := all.seenIn([]byte(agent.output())); len(seen) > 0 {
				t.Errorf("the agent with the %s password has said %q", name, seen)
			}
		})
	}
	watch.saw(t, "sh -c") // what gives the password
	watch.saw(t, "culvert agent")
	watch.saw(t, "culvert expose")

	// What is wrong in flags and files is quoted, but for passwords.
	for _, url := range []string{"http://corp:" + proxyPass + "@127.0.0.1:" + proxyPort, "http://corp:" + proxyPass + "@127.0.0.1:port", "ftp://corp:" + proxyPass + "@/"} {
		bad := w.write(t, "url.yaml", fmt.Sprintf("agent: {gateway: %q}\nupstreamProxy: %q\n", gwName, url))
		run(2, "config", "check", bad)
		run(2, "agent", "--config", bad)
	}
	for _, part := range []string{
		"services: [{name: a.test, ports: [443], via: [{websocket: \"wss://alice:%s@gw.test/\"}]}]",
		"services: []\nidentity: {trust: {a.test: {bundle: \"https://alice:%s@gw.test/\"}}}",
		"services: []\nidentity: {tokens: [{issuer: \"https://alice:%s@gw.test/\", audience: [a]}]}",
		"services: []\nidentity: {tokens: [{issuer: \"https://a.test/\", jwks: \"https://alice:%s@gw.test/\", audience: [a]}]}",
	} {
		run(2, "config", "check", w.write(t, "part.yaml", "listeners: [{address: \":1\"}]\n"+fmt.Sprintf(part, userPass)+"\n"))
	}
	bad := w.write(t, "inline.yaml", fmt.Sprintf("agent: {gateway: %q, user: alice, password: %q}\n", gwName, userPass))
	run(2, "config", "check", bad)

	for _, args := range [][]string{{"status"}, {"status", "-o", "json"}, {"connectors"}, {"devices"}, {"devices", "-o", "json"}, {"peers"}, {"refusals"}, {"tunnels"}, {"policies"}, {"explain", svc + ":443"}} {
		if args[0] == "policies" {
			args = []string{"policy", "list"}
		}
		out, errs, _ := command(t, "culvert", append(args, "--admin", admin)...)
		said = append(said, out+errs)
	}
	for _, path := range []string{"/status", "/metrics", "/tunnels", "/refusals", "/connectors", "/debug/pprof/cmdline", "/debug/pprof/goroutine?debug=2"} {
		body, err := far.get(path)
		if err != nil {
			t.Logf("%s: %v", path, err)
		}
		said = append(said, string(body))
	}
	for i, text := range append(said, far.output(), expose.output(), join.output()) {
		if seen := all.seenIn([]byte(text)); len(seen) > 0 {
			slices.Sort(seen)
			t.Errorf("text %d has %q:\n%s", i, seen, text)
		}
	}

	// What is kept is for its owner alone, and the gateway has no token.
	for _, dir := range []string{device, filepath.Join(w.dir, "enrollment"), filepath.Join(w.dir, "site")} {
		files := 0
		must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			files++
			info, err := d.Info()
			if err != nil {
				return err
			}
			if info.Mode().Perm()&0o077 != 0 && info.Size() > 0 {
				t.Errorf("%s has the mode %v, want one for its owner alone", path, info.Mode())
			}
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if seen := tokens.seenIn(content); len(seen) > 0 {
				t.Errorf("%s has %q", path, seen)
			}
			return nil
		}))
		if files == 0 {
			t.Errorf("%s has no file", dir)
		}
	}
}

// exchanged runs culvert with something on its standard input, and returns what it says.
func exchanged(t *testing.T, input string, args ...string) string {
	t.Helper()
	out, errs, code := runCmd(t, withInput(t, input, args...))
	if code == 0 {
		t.Errorf("culvert %v: no error: %s", args, out)
	}
	return out + errs
}
