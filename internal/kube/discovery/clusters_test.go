package discovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/registry"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const goodConfig = `apiVersion: v1
kind: Config
clusters:
- name: c
  cluster: {server: "https://SERVER:6443", certificate-authority-data: ""}
users:
- name: u
  user: {token: hush-hush}
contexts:
- name: x
  context: {cluster: c, user: u}
current-context: x
`

func TestKubeconfigsThatAreRefused(t *testing.T) {
	change := func(old, new string) string {
		t.Helper()
		if !strings.Contains(goodConfig, old) {
			t.Fatalf("no %q to change", old)
		}
		return strings.Replace(goodConfig, old, new, 1)
	}
	user := func(s string) string { return change("{token: hush-hush}", "{token: hush-hush, "+s+"}") }
	for _, tt := range []struct{ name, config, want string }{
		{"good", goodConfig, ""},
		{"exec", user(`exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/sh, interactiveMode: Never}`), "exec"},
		{"exec of a user that is not used", change("users:\n", "users:\n- name: v\n  user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: /bin/sh}}\n"), "exec"},
		{"auth-provider", user(`auth-provider: {name: gcp}`), "auth-provider"},
		{"a token's file", user(`tokenFile: /var/run/secrets/token`), "tokenFile"},
		{"a certificate's file", user(`client-certificate: /etc/x.pem`), "client-certificate,"},
		{"a key's file", user(`client-key: /etc/x.pem`), "client-key,"},
		{"a root's file", change(`certificate-authority-data: ""`, "certificate-authority: /etc/x.pem"), "certificate-authority,"},
		{"without verification", change(`certificate-authority-data: ""`, "insecure-skip-tls-verify: true"), "insecure-skip-tls-verify"},
		{"plain HTTP", change("https://", "http://"), "not an https:// URL"},
		{"a server without a scheme", change("https://SERVER:6443", "SERVER:6443"), "not an https:// URL"},
		{"no server", change(`server: "https://SERVER:6443", `, ""), "not an https:// URL"},
		{"no current context", change("current-context: x\n", ""), "no current-context"},
		{"another current context", change("current-context: x", "current-context: other"), "not among its contexts"},
		{"another cluster", change("cluster: c,", "cluster: d,"), "not among its clusters"},
		{"another user", change("user: u}", "user: w}"), "not among its users"},
		{"certificates that are none", user(`client-certificate-data: aHVzaC1odXNo`), "can't be used"},
		{"no YAML", "hush-hush: [", "not a kubeconfig"},
		{"nothing", "", "no current-context"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg, err := parseKubeconfig([]byte(tt.config))
			switch {
			case tt.want == "" && (err != nil || cfg.Host != "https://SERVER:6443" || cfg.BearerToken != "hush-hush"):
				t.Errorf("got %v, %v", cfg, err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("got %v, want an error with %q", err, tt.want)
			case err != nil && strings.Contains(err.Error(), "hush"):
				t.Errorf("the error tells a secret: %v", err)
			}
		})
	}
}

// config makes a Secret with the kubeconfig of server.
func config(name, cluster, server string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "sys", Name: name, Labels: map[string]string{LabelCluster: cluster}, CreationTimestamp: metav1.NewTime(epoch)},
		Data:       map[string][]byte{KubeconfigKey: []byte(strings.Replace(goodConfig, "SERVER", server, 1))},
	}
}

// said is what a test has updates as, the newest of each source.
func said(list []registry.Update) string {
	newest := map[string]string{}
	for _, u := range list {
		newest[u.Source] = listing(u.Snapshot)
		if u.Err != nil {
			newest[u.Source] = "error"
		}
	}
	var all []string
	for _, name := range []string{"clusters/sys", "cluster/own", "cluster/east", "cluster/west"} {
		if s, ok := newest[name]; ok {
			all = append(all, name+": "+s)
		}
	}
	return strings.Join(all, " | ")
}

func TestClusters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		east, west := newRig(t, svc("shop", "e", "expose", "true")), newRig(t, svc("shop", "w", "expose", "true"))
		other := newRig(t, svc("shop", "o", "expose", "true"))
		r := newRig(t, config("a", "east", "east"))
		networked := config("b", "west", "west")
		networked.Annotations = map[string]string{NoteNetwork: "wide"}
		r.put(networked)
		var began []string
		c := &Clusters{
			Client: r.api, Namespace: "sys", Own: "own", Log: r.logger(),
			Connect: func(cfg *rest.Config) (kubernetes.Interface, error) {
				for host, rig := range map[string]*rig{"https://east:6443": east, "https://west:6443": west, "https://other:6443": other} {
					if cfg.Host == host {
						return rig.api, nil
					}
				}
				return nil, errors.New("no such host")
			},
			New: func(string) *Source { return &Source{Prefer: PreferBoth} },
			OnCluster: func(_ context.Context, name string, cfg *rest.Config, src *Source) func() {
				began = append(began, "+"+name+" "+cfg.Host+" "+src.PodNetwork()+" "+src.Prefer)
				return func() { began = append(began, "-"+name) }
			},
		}
		if names := c.Names(); names != nil {
			t.Errorf("before the Secrets are seen there are the names %q", names)
		}
		r.start(c)
		step := func(what, want string) {
			t.Helper()
			if got := said(r.after(moment)); got != want {
				t.Errorf("%s:\ngot  %s\nwant %s", what, got, want)
			}
		}
		step("at first", "clusters/sys:  | cluster/east: e.shop.east to everyone at [] | cluster/west: w.shop.west to everyone at []")

		r.put(config("c", "own", "other"))
		step("our own", "")
		r.put(config("d", "west", "other"))
		step("one that is there", "")
		r.put(config("e", "No", "other"))
		step("no label", "")
		for _, want := range []string{`cluster \"own\" is the gateway's own and needs no Secret`, `cluster \"west\" is already defined by Secret \"b\"`, `\"No\" is not a cluster name`} {
			if n := r.logged(want); n != 1 {
				t.Errorf("the log says %d times %s, want once:\n%s", n, want, r.log.String())
			}
		}

		if got := strings.Join(c.Names(), " "); got != "clusters/sys cluster/east cluster/west" {
			t.Errorf("the names are %q", got)
		}

		bad := config("a", "east", "east")
		bad.Data[KubeconfigKey] = []byte("hush-hush")
		r.put(bad)
		east.put(svc("shop", "e2"))
		step("one that turns bad", "cluster/east: e.shop.east to everyone at []; e2.shop.east to nobody at []")
		r.put(config("a", "east", "other"))
		step("another server", "cluster/east: o.shop.east to everyone at []")
		r.remove(networked)
		step("gone, and the next takes its place", "cluster/west: o.shop.west to everyone at []")
		r.remove(config("d", "west", "other"))
		step("gone", "cluster/west: ")
		r.put(config("f", "west", "nowhere"))
		step("can't be had", "cluster/west: error")
		r.remove(config("f", "west", "nowhere"))
		step("is no longer wanted", "cluster/west: ")

		r.setFail(func(_, _, _ string) error { return errRefused })
		step("without the API server of the Secrets", "clusters/sys: error")
		other.put(svc("shop", "o2"))
		step("meanwhile", "cluster/east: o.shop.east to everyone at []; o2.shop.east to nobody at []")
		r.setFail(nil)
		if got := said(r.after(20 * time.Second)); got != "clusters/sys: " {
			t.Errorf("back: %s", got)
		}
		want := []string{
			"+east https://east:6443 east both", "+west https://west:6443 wide both", "-east", "+east https://other:6443 east both",
			"-west", "+west https://other:6443 west both", "-west",
		}
		if !slices.Equal(began, want) {
			t.Errorf("clusters came and went as %q, want %q", began, want)
		}
		if strings.Contains(r.log.String(), "hush") {
			t.Error("the log tells a secret")
		}
	})
}

// Half of the clusters would be a table that refuses what the others serve.
func TestClustersSpeakTogetherAtFirst(t *testing.T) {
	for _, tt := range []struct {
		slow time.Duration
		want string // what the first words are
	}{
		{2 * time.Second, "clusters/sys:  | cluster/east: e.shop.east to nobody at [] | cluster/west: w.shop.west to nobody at []"},
		{time.Minute, "clusters/sys:  | cluster/east: e.shop.east to nobody at [] | cluster/west: error"},
	} {
		t.Run(fmt.Sprint(tt.slow), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				east, west := newRig(t, svc("shop", "e")), newRig(t, svc("shop", "w"))
				start := time.Now()
				west.setFail(func(_, _, _ string) error {
					if time.Since(start) < tt.slow {
						return context.Canceled // which says nothing
					}
					return nil
				})
				r := newRig(t, config("a", "east", "east"), config("b", "west", "west"))
				r.start(&Clusters{Client: r.api, Namespace: "sys", Connect: func(cfg *rest.Config) (kubernetes.Interface, error) {
					if cfg.Host == "https://east:6443" {
						return east.api, nil
					}
					return west.api, nil
				}})
				r.none(moment)
				list := r.after(gatherTimeout)
				if got := said(list); got != tt.want {
					t.Errorf("got %s, want %s", got, tt.want)
				}
				if got := said(append(list, r.after(2*tt.slow)...)); !strings.Contains(got, "cluster/west: w") {
					t.Errorf("in the end: %s", got)
				}
			})
		})
	}
}

func TestClustersDenied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.setFail(func(verb, resource, _ string) error { return denied(verb, resource) })
		r.start(&Clusters{Client: r.api, Namespace: "sys", Log: r.logger()})
		if got := said(r.after(5 * time.Minute)); got != "clusters/sys: error" {
			t.Errorf("got %s, want clusters/sys: error", got)
		}
		if n := r.logged("may not list secrets", "verb=list", "resource=secrets", "namespace=sys"); n != 1 {
			t.Errorf("the log says it %d times, want once:\n%s", n, r.log.String())
		}
	})
}
