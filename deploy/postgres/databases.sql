-- Creates the databases and users of Prefect and MLflow, as a superuser of PostgreSQL 14 or newer; existing ones stay:
--   PREFECT_DATABASE_PASSWORD=… MLFLOW_DATABASE_PASSWORD=… psql --no-psqlrc --file deploy/postgres/databases.sql
-- The passwords come from the environment, to keep them off the command line; without them nothing is created.
\set ON_ERROR_STOP on
\getenv prefect_password PREFECT_DATABASE_PASSWORD
\getenv mlflow_password MLFLOW_DATABASE_PASSWORD

-- Keep the following statements out of PostgreSQL's log.
SET log_statement = 'none';
SET log_min_duration_statement = -1;
SET log_min_error_statement = 'panic';

-- Create only missing roles and databases, to allow another run after an interruption or a dropped database.
SELECT format('CREATE ROLE %I LOGIN PASSWORD %L', name, password)
FROM (VALUES ('prefect', :'prefect_password'), ('mlflow', :'mlflow_password')) AS wanted (name, password)
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name)
\gexec

-- mlflow_users: MLflow's users and their permissions.
SELECT format('CREATE DATABASE %I OWNER %I', name, owner)
FROM (VALUES ('prefect', 'prefect'), ('mlflow', 'mlflow'), ('mlflow_users', 'mlflow')) AS wanted (name, owner)
WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = name)
\gexec

REVOKE ALL ON DATABASE prefect, mlflow, mlflow_users FROM PUBLIC;
