package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"culvert.dev/internal/testnet"
)

// A device joins by a token, exposes a service without further flags and is called back, until
// it is removed: then its names go, and it can't come back.
func TestADeviceJoinsAndExposes(t *testing.T) {
	w := newReverseWorld(t)
	gw := w.issue(t, "spiffe://corp.example/ns/gw/sa/gw1", "localhost")
	ca := t.TempDir()
	if err := w.ca.Save(ca); err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(filepath.Join(ca, "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	config := func(port string) string {
		return fmt.Sprintf(`cluster: gw
listeners:
  - {address: "127.0.0.1:1", protocols: [sni], tls: {names: [localhost], key: gw, trust: corp.example, clientCertificates: optional, protocols: [connect-h2]}}
identity:
  keys: {gw: {certificateFile: gw.crt, keyFile: gw.key}}
  trust: {corp.example: {caFile: ca.pem}}
enrollment: {gateway: "localhost:%s", key: gw, trustDomain: corp.example, certificateFile: ca.pem, keyFile: ca.key, state: enrollment}
policies:
  - {name: devices, verb: register, action: allow, targets: {names: ["*.edge.example"]}, rules: [{sources: [{spiffe: ["spiffe://corp.example/device/*"]}]}]}
services: []
admin: "127.0.0.1:2"
adminControl: true
`, port)
	}
	w.gateway = startFile(t, map[string]string{"gw.crt": string(gw.CertPEM), "gw.key": string(gw.KeyPEM), "ca.pem": string(w.ca.CertPEM), "ca.key": string(key), "culvert.yaml": config("443")})
	_, port, _ := strings.Cut(w.gateway.addrs[0], ":")
	w.gateway.write(t, "culvert.yaml", config(port))
	w.gateway.source.Reload()
	site := &testSite{running: w.gateway}
	folder := filepath.Join(t.TempDir(), "device")
	token := ""
	testnet.Eventually(t, patience, func() bool {
		var code int
		if token, code = site.command(t, "", "invite", "--device", "cam-7"); code != exitOK {
			return false
		}
		out, code := runText(t, token, "join", "--state", folder, "-")
		return code == exitOK && strings.Contains(out, "joined as spiffe://corp.example/device/cam-7\n")
	}, "the device joins") // the first token may have the address from before
	if strings.Contains(w.gateway.log.String(), strings.TrimSpace(token)) {
		t.Error("the log has the token")
	}
	for args, want := range map[string]string{
		"join --state " + folder + " -":                                  "--replace",
		"join --state " + folder + "2 -":                                 "was used already",
		"join --zones *.a.example --state x -":                           "--zones is for a site",
		"join --state " + folder + "2 " + token[:40]:                     "never an argument",
		"expose a.edge.example --to 127.0.0.1:1 --state " + folder + "2": "no device has joined",
	} {
		if out, code := runText(t, token, strings.Fields(args)...); code == exitOK || !strings.Contains(out, want) {
			t.Errorf("culvert %s: %q, want %q", args, out, want)
		}
	}

	var out syncBuffer
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		Main(ctx, []string{"expose", "cam.edge.example", "--to", w.service.Addr().String(), "--state", folder}, &out, &out)
	}()
	t.Cleanup(func() { cancel(); <-done })
	testnet.Eventually(t, patience, func() bool { return strings.Contains(out.String(), "cam.edge.example is registered") }, "the name is registered")
	if got, err := w.ask(t, "cam.edge.example"); err != nil || got != helloClient {
		t.Fatalf("got %q and %v, want %q", got, err, helloClient)
	}
	if got, err := w.askByConnect(t, folder, "cam.edge.example"); err != nil || got != helloClient {
		t.Errorf("connect with the identity of the device: got %q and %v, want %q", got, err, helloClient)
	}
	if list, _ := site.command(t, "", "devices"); !strings.Contains(list, "spiffe://corp.example/device/cam-7") || !strings.Contains(list, " for 23h") {
		t.Errorf("devices are %q", list)
	}
	if text, code := site.command(t, "", "devices", "remove", "cam-7"); code != exitOK || text != "removed cam-7\n" {
		t.Errorf("removing the device: %q", text)
	}
	testnet.Eventually(t, patience, func() bool {
		_, err := w.ask(t, "cam.edge.example")
		return err != nil && len(w.gateway.Connectors().Sessions) == 0
	}, "the session of the device has ended")
	testnet.Eventually(t, patience, func() bool {
		return strings.Contains(w.gateway.log.String(), "target=reverse.culvert.alt:443 reason=revoked")
	}, "the device is refused when it comes back")
	if n := len(w.gateway.Connectors().Sessions); n != 0 {
		t.Errorf("the device that was removed has %d sessions", n)
	}
	if list, _ := site.command(t, "", "devices"); list != "no device has joined\n" {
		t.Errorf("devices are %q", list)
	}
}

// runText runs a command with a text on standard input, and returns what it says.
func runText(t *testing.T, stdin string, args ...string) (string, int) {
	t.Helper()
	var out syncBuffer
	root := New()
	root.SetArgs(args)
	root.SetIn(strings.NewReader(stdin))
	root.SetOut(&out)
	root.SetErr(&out)
	if err := root.ExecuteContext(t.Context()); err != nil {
		text := err.Error()
		if ce, ok := err.(*cliError); ok {
			text += " " + ce.hint
		}
		return out.String() + text, exitFailed
	}
	return out.String(), exitOK
}

// askByConnect is ask by "culvert connect", as the device that has joined in a folder. It is a
// process of its own, which is no loop to the connector of this one.
func (w *reverseWorld) askByConnect(t *testing.T, folder, name string) (answer string, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "culvert", "connect", "--state", folder, name, "443") // of TestMain
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := errors.Join(inErr, outErr, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	c := tls.Client(pipes{Reader: out, WriteCloser: in}, &tls.Config{ServerName: name, RootCAs: w.ca.Pool(), Certificates: []tls.Certificate{w.client.TLS}})
	answer, err = bufio.NewReader(c).ReadString('\n')
	_ = in.Close()
	if err := errors.Join(err, cmd.Wait()); err != nil {
		return answer, fmt.Errorf("%w: %s", err, errs.String())
	}
	return answer, nil
}

// pipes are a net.Conn without deadlines.
type pipes struct {
	net.Conn // nil
	io.Reader
	io.WriteCloser
}

func (p pipes) Read(b []byte) (int, error)  { return p.Reader.Read(b) }
func (p pipes) Write(b []byte) (int, error) { return p.WriteCloser.Write(b) }
func (p pipes) Close() error                { return p.WriteCloser.Close() }
