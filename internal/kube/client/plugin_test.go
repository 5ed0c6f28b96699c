package client

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// pluginToken is the variable that makes this program a plugin, with the token that it gets.
const pluginToken = "CULVERT_TEST_PLUGIN_TOKEN"

// runPlugin prints the token as a plugin does: once for all requests, and not at a terminal.
func runPlugin(token string) {
	var info struct {
		APIVersion string
		Spec       struct{ Interactive bool }
	}
	if err := json.Unmarshal([]byte(os.Getenv("KUBERNETES_EXEC_INFO")), &info); err != nil || info.Spec.Interactive {
		fmt.Fprintln(os.Stderr, "not as a plugin without a terminal:", err, info.Spec.Interactive)
		os.Exit(1)
	}
	fmt.Printf(`{"apiVersion": %q, "kind": "ExecCredential", "status": {"token": %q}}`, info.APIVersion, token)
}

// The credentials of a kubeconfig may be those that a program prints. What cannot run is an error
// before the first request.
func TestPlugin(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer from-plugin" {
			http.Error(w, "who?", http.StatusUnauthorized)
			return
		}
		_, _ = fmt.Fprint(w, `{"gitVersion": "v1.2.3"}`)
	}))
	defer server.Close()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	load := func(command, interactive, more string) (*rest.Config, error) {
		path := filepath.Join(dir, "config")
		text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {server: %q, certificate-authority: ca.pem}}]
users: [{name: a, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: %q, interactiveMode: %s, env: [{name: %s, value: from-plugin}]%s}}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
`, server.URL, command, interactive, pluginToken, more)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return Config{Kubeconfig: path}.REST()
	}
	for _, interactive := range []string{"Never", "IfAvailable"} {
		cfg, err := load(self, interactive, "")
		if err != nil {
			t.Fatal(err)
		}
		c, err := kubernetes.NewForConfig(Protobuf(cfg))
		if err != nil {
			t.Fatal(err)
		}
		if v, err := c.Discovery().ServerVersion(); err != nil || v.GitVersion != "v1.2.3" {
			t.Errorf("interactiveMode %s: %v, %v", interactive, v, err)
		}
	}
	for _, tt := range []struct{ name, command, interactive, more, want string }{
		{"needs a terminal", self, "Always", "", "asks at a terminal"},
		{"missing", "culvert-has-no-such-plugin", "Never", "", "install it, or write its absolute path"},
		{"missing, with a hint", "culvert-has-no-such-plugin", "Never", ", installHint: apt-get it", "apt-get it"},
		{"missing beside the kubeconfig", "./plugin", "Never", "", filepath.Join(dir, "plugin")},
	} {
		if _, err := load(tt.command, tt.interactive, tt.more); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got error %v, want one with %q", tt.name, err, tt.want)
		}
	}
	if _, err := load("plugin", "Sometimes", ""); err == nil || errors.Unwrap(err) == nil {
		t.Errorf("an unknown interactiveMode: %v", err)
	}
}
