package kubeconfig

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const before = `# mine
apiVersion: v1
kind: Config
current-context: home
preferences: {}
clusters:
- name: home # in the cellar
  cluster: {server: "https://192.0.2.1:6443", certificate-authority-data: Zm9v}
contexts:
- context:
    cluster: home
    namespace: kitchen
    user: me
  name: home
users:
- name: me
  user:
    exec: {apiVersion: client.authentication.k8s.io/v1, command: get-token, args: [--for, home]}
extensions: [{name: other, extension: {a: 1}}]
`

func entry() *Entry {
	return &Entry{Name: "west", Server: "https://kube.west.example:443", ProxyURL: "socks5://127.0.0.1:1080", CAFile: "/ca.pem", CertFile: "/me.pem", KeyFile: "/me.key", Current: true}
}

// merge1 merges e into a kubeconfig of one file.
func merge1(text []byte, e *Entry) ([]byte, error) {
	root, err := parse(text)
	if err != nil {
		return nil, err
	}
	d := &document{path: "config", root: root}
	if err := (&documents{all: []*document{d}, into: d}).merge(e); err != nil {
		return nil, err
	}
	return d.encode()
}

// What was there stays as it was, and a second time changes nothing.
func TestMerge(t *testing.T) {
	got, err := merge1([]byte(before), entry())
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"# mine", "# in the cellar", "current-context: west", "proxy-url: socks5://127.0.0.1:1080"} {
		if !strings.Contains(string(got), want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	type config = map[string]any
	var was, is config
	if err := errors.Join(yaml.Unmarshal([]byte(before), &was), yaml.Unmarshal(got, &is)); err != nil {
		t.Fatal(err)
	}
	for list, item := range map[string]config{
		"clusters": {"name": "west", "cluster": config{"server": "https://kube.west.example:443", "proxy-url": "socks5://127.0.0.1:1080", "certificate-authority": "/ca.pem"}},
		"contexts": {"name": "west", "context": config{"cluster": "west", "user": "west"}},
		"users":    {"name": "west", "user": config{"client-certificate": "/me.pem", "client-key": "/me.key"}},
	} {
		was[list] = append(was[list].([]any), item)
	}
	was["current-context"] = "west"
	if !reflect.DeepEqual(is, was) {
		t.Errorf("got %v, want %v", is, was)
	}
	again, err := merge1(got, entry())
	if err != nil || string(again) != string(got) {
		t.Errorf("the second time: %v\n%s", err, again)
	}
}

func TestMergeChangesItsOwn(t *testing.T) {
	text, err := merge1(nil, entry())
	if err != nil {
		t.Fatal(err)
	}
	// By SNI at a gateway, with a token; the CA stays.
	e := &Entry{Name: "west", Server: "https://gw.example:443", ServerName: "kube.west.example", TokenFile: "/token", Namespace: "shop"}
	var taken *TakenError
	if _, err := merge1(text, e); !errors.As(err, &taken) || taken.Server != "https://kube.west.example:443" {
		t.Errorf("another server: %v", err)
	}
	e.Replace = true
	if text, err = merge1(text, e); err != nil {
		t.Fatal(err)
	}
	const want = `apiVersion: v1
kind: Config
clusters:
  - name: west
    cluster:
      server: https://gw.example:443
      certificate-authority: /ca.pem
      tls-server-name: kube.west.example
contexts:
  - name: west
    context:
      cluster: west
      user: west
      namespace: shop
users:
  - name: west
    user:
      tokenFile: /token
current-context: west
`
	if string(text) != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	// The credentials of another user, of which there must be one.
	e = &Entry{Name: "east", Server: "https://kube.east.example", User: "west"}
	if text, err = merge1(text, e); err != nil || !strings.Contains(string(text), "cluster: east\n      user: west\n") {
		t.Errorf("%v\n%s", err, text)
	}
	e.User = "nobody"
	if _, err = merge1(text, e); err == nil {
		t.Error("a user that is not there")
	}
	// Credentials of another kind are not replaced by these without a word.
	text = []byte("users: [{name: west, user: {exec: {command: get-token}}}]")
	if got, err := merge1(text, entry()); !errors.As(err, &taken) || taken.User != "exec" {
		t.Errorf("a user with a plugin: %v\n%s", err, got)
	}
	if got, err := merge1(text, &Entry{Name: "west", Server: "https://kube.west.example"}); err != nil || !strings.Contains(string(got), "{command: get-token}") || !strings.Contains(string(got), "user: west") {
		t.Errorf("with a plugin: %v\n%s", err, got)
	}
	e = entry()
	e.Replace = true
	if got, err := merge1(text, e); err != nil || strings.Contains(string(got), "exec") {
		t.Errorf("in place of a plugin: %v\n%s", err, got)
	}
	// The context of a name may be that of another cluster.
	text = []byte("contexts: [{name: east, context: {cluster: other}}]")
	if _, err := merge1(text, &Entry{Name: "east", Server: "https://kube.east.example"}); !errors.As(err, &taken) || taken.Server != "other" {
		t.Errorf("a context of another cluster: %v", err)
	}
}

func TestMergeRefuses(t *testing.T) {
	for _, bad := range []string{
		"- a", "text", "clusters: {a: 1}", "a: [", "a: 1\n---\nb: 2", "clusters: [{name: west, cluster: 1}]",
		"a: &a {server: x}\nclusters: [{name: west, cluster: *a}]", "clusters: [{name: west, cluster: &a {server: x}}, {name: b, cluster: *a}]",
	} {
		if got, err := merge1([]byte(bad), entry()); err == nil {
			t.Errorf("%q becomes\n%s", bad, got)
		}
	}
}

// FuzzMerge: what is merged can be merged again, has the entry, and changes no more.
func FuzzMerge(f *testing.F) {
	f.Add(before)
	f.Add("")
	f.Add(`{"apiVersion":"v1","clusters":null,"users":[],"contexts":[{"name":"west"}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		once, err := merge1([]byte(text), entry())
		if err != nil {
			return
		}
		twice, err := merge1(once, entry())
		if err != nil {
			t.Fatalf("%v of\n%s", err, once)
		}
		var a, b any
		if err := errors.Join(yaml.Unmarshal(once, &a), yaml.Unmarshal(twice, &b)); err != nil {
			return // of keys that are there twice
		}
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s\nbecomes\n%s", once, twice)
		}
	})
}
