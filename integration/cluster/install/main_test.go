// Package install tests that what "culvert install" prints can be applied to a
// real API server, that it runs there, and that it has the rights it needs and
// no others.
package install

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/component-base/cli"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"sigs.k8s.io/yaml"

	"culvert.dev/integration/cluster"
)

// This program is kubectl, too, where it is called so.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "kubectl" {
		os.Exit(cli.Run(kubectl.NewDefaultKubectlCommand()))
	}
	cluster.Main(m)
}

// warnings are what an API server has to say of what it takes.
type warnings struct {
	mu   sync.Mutex
	said []string
}

func (w *warnings) HandleWarningHeader(_ int, _ string, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said = append(w.said, text)
}

// apply sends documents by server-side apply, each in its turn, without taking
// fields from others, and fails on warnings.
func apply(t *testing.T, c *cluster.Cluster, docs string, opts metav1.ApplyOptions) {
	t.Helper()
	var heard warnings
	cfg := rest.CopyConfig(c.REST)
	cfg.WarningHandler = &heard
	client, err := dynamic.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	opts.FieldManager = "install"
	for doc := range strings.SplitSeq(docs, "\n---\n") {
		o := object(t, doc)
		r := client.Resource(resourceOf(o))
		var in dynamic.ResourceInterface = r
		if ns := o.GetNamespace(); ns != "" {
			in = r.Namespace(ns)
		}
		if _, err := in.Apply(t.Context(), o.GetName(), o, opts); err != nil {
			t.Errorf("%s %s: %v", o.GetKind(), o.GetName(), err)
		}
		if len(heard.said) > 0 {
			t.Errorf("%s %s: the API server warns: %q", o.GetKind(), o.GetName(), heard.said)
			heard.said = nil
		}
	}
}

func object(t *testing.T, doc string) *unstructured.Unstructured {
	t.Helper()
	o := &unstructured.Unstructured{}
	if err := yaml.UnmarshalStrict([]byte(doc), &o.Object); err != nil {
		t.Fatalf("%v in\n%s", err, doc)
	}
	return o
}

// resourceOf is the plural of all kinds that are installed.
func resourceOf(o *unstructured.Unstructured) schema.GroupVersionResource {
	gvk := o.GroupVersionKind()
	name := strings.ToLower(gvk.Kind) + "s"
	switch {
	case strings.HasSuffix(name, "ys"):
		name = strings.TrimSuffix(name, "ys") + "ies"
	case strings.HasSuffix(name, "sss"), strings.HasSuffix(name, "ss") && strings.HasSuffix(gvk.Kind, "s"):
		name = strings.TrimSuffix(name, "s") + "es"
	}
	return gvk.GroupVersion().WithResource(name)
}

// An audit is what the API server writes of requests of ServiceAccounts.
type audit struct{ file string }

// newAudit returns flags of an API server that writes one.
func newAudit(t *testing.T) (*audit, []string) {
	t.Helper()
	dir := t.TempDir()
	a := &audit{filepath.Join(dir, "audit.log")}
	policy := filepath.Join(dir, "policy.yaml")
	err := os.WriteFile(policy, []byte(`apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    userGroups: ["system:serviceaccounts"]
  - level: None
`), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return a, []string{"--audit-policy-file=" + policy, "--audit-log-path=" + a.file}
}

// A request is one of a ServiceAccount.
type request struct {
	Verb string `json:"verb"`
	User struct {
		Username string `json:"username"`
	} `json:"user"`
	UserAgent string `json:"userAgent"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
		APIGroup    string `json:"apiGroup"`
		Subresource string `json:"subresource"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
}

// right is the request in the words of a role.
func (r *request) right() string {
	resource := r.ObjectRef.Resource
	if r.ObjectRef.Subresource != "" {
		resource += "/" + r.ObjectRef.Subresource
	}
	return fmt.Sprintf("%s %s.%s", r.Verb, resource, r.ObjectRef.APIGroup)
}

// of are the requests of one account so far.
func (a *audit) of(t *testing.T, namespace, account string) (all []request) {
	t.Helper()
	f, err := os.Open(a.file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			continue // it is being written
		}
		if r.ObjectRef.Resource == "" {
			continue // whether the API server answers, which anybody may ask
		}
		if r.User.Username == "system:serviceaccount:"+namespace+":"+account {
			all = append(all, r)
		}
	}
	return all
}

// forbidden are those of requests that were, and done what was, each once.
func forbidden(all []request) (denied, done []string) {
	for _, r := range all {
		right := r.right()
		if r.ResponseStatus.Code == 403 {
			denied = append(denied, fmt.Sprintf("%s in %q of %q", right, r.ObjectRef.Namespace, r.ObjectRef.Name))
		} else {
			done = append(done, right)
		}
	}
	slices.Sort(denied)
	slices.Sort(done)
	return slices.Compact(denied), slices.Compact(done)
}
